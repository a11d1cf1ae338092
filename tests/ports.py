"""Ports for servers of tests: see `loadtest.engines.ports`."""

from loadtest.engines.ports import free_port

__all__ = ["free_port"]
