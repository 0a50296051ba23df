"""Ansible action: run_ledger, run in a fork of the worker."""

from __future__ import annotations

from pennypod.action import ForkedModule, load_module


class ActionModule(ForkedModule):
    module = load_module("run_ledger")
