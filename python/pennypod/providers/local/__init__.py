"""The local provider: pods are containers with a real sshd on a loopback port. Floor 1."""

from pennypod.providers.local.engine import engine_installed
from pennypod.providers.local.provider import LocalProvider, local_provider

__all__ = ["LocalProvider", "engine_installed", "local_provider"]
