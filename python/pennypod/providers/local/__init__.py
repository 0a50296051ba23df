"""The local provider: pods are containers with a real sshd on a loopback port. Floor 1."""

from pennypod.providers.local.provider import LocalProvider, local_provider

__all__ = ["LocalProvider", "local_provider"]
