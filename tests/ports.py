"""Ports for servers of tests: see `loadtest.engines.ports`."""

from loadtest.engines.ports import free_port

__all__ = ["free_port"]


def ports_in_a_row(number: int) -> int:
    """Find so many free ports in a row; return the first."""
    while True:
        ports = [free_port() for _ in range(number)]
        if ports[-1] == ports[0] + number - 1:
            return ports[0]
