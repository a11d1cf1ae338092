"""What a service manager is told: sd_notify(3) and sd_watchdog_enabled(3) of systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


def notify(environment: Mapping[str, str], state: str) -> None:
    """Send a state, such as `READY=1`; do nothing if no service manager listens."""
    address = environment.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), address)


def watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return how long to wait between two `WATCHDOG=1`; None: nobody waits for them."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    within_us = environment.get("WATCHDOG_USEC", "")
    return int(within_us) / 2e6 if within_us.isdecimal() and int(within_us) else None
