"""The machine that a report was made on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from msgspec import Struct


class Machine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a report says of its machine; a default is not written."""

    num_cpus: int
    python: str
    system: str
    warmroute: str
    load_average: float | None = None  # over the last minute; None: not asked, or not known


def this_machine() -> Machine:
    """Describe the machine, without its load: a report can be made again when that is over."""
    return Machine(
        num_cpus=os.cpu_count() or 1,
        python=platform.python_version(),
        system=platform.system(),
        warmroute=version("warmroute"),
    )
