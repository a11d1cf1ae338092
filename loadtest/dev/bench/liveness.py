"""Asks `/healthz` as an orchestrator does, in a process of its own: a new connection each time.

A line on stdout for each answer: the time it took in milliseconds, and its status; 0 for none.
"""

from __future__ import annotations

import http.client
import time
from typing import Final

import click

_PAUSE_S: Final = 0.02
_PATIENCE_S: Final = 10.0


@click.command()
@click.argument("port", type=int)
def main(port: int) -> None:
    """Ask the router on PORT until killed."""
    while True:
        start_s, status = time.perf_counter(), 0
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", "/healthz")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            pass  # shown as 0
        finally:
            connection.close()
        click.echo(f"{(time.perf_counter() - start_s) * 1000:.3f} {status}")
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
