"""The machine that a report was made on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from msgspec import Struct


class Machine(Struct, frozen=True, kw_only=True):
    """What a report says of its machine."""

    num_cpus: int
    python: str
    system: str
    warmroute: str


def this_machine() -> Machine:
    """Describe the machine."""
    return Machine(
        num_cpus=os.cpu_count() or 1,
        python=platform.python_version(),
        system=platform.system(),
        warmroute=version("warmroute"),
    )
