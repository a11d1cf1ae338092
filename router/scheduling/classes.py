"""Service classes.

interactive   a person waits for the answer; the default
batch         goes when no interactive request can, and is refused first
"""

from __future__ import annotations

from typing import Final, Literal, get_args

ServiceClass = Literal["interactive", "batch"]

CLASSES: Final[tuple[ServiceClass, ...]] = get_args(ServiceClass)
INTERACTIVE: Final[ServiceClass] = "interactive"
BATCH: Final[ServiceClass] = "batch"


def lower(one: ServiceClass, other: ServiceClass) -> ServiceClass:
    """Return the class of the two that waits for the other."""
    return BATCH if BATCH in (one, other) else INTERACTIVE
