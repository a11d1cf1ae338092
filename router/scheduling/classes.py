"""Service classes.

interactive   a person waits for the answer; the default
batch         goes when no interactive request can, and is refused first
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, get_args

from router.base.errors import BadRequest

ServiceClass = Literal["interactive", "batch"]

CLASSES: Final[tuple[ServiceClass, ...]] = get_args(ServiceClass)
INTERACTIVE: Final[ServiceClass] = "interactive"
BATCH: Final[ServiceClass] = "batch"


CLASS_HEADER: Final = "x-warmroute-class"
DEADLINE_HEADER: Final = "x-warmroute-deadline-ms"
MAX_DEADLINE_MS: Final = 3_600_000

KEEPALIVE_HEADER: Final = "x-warmroute-keepalive-s"
MAX_KEEPALIVE_S: Final = 600

_NUMBER: Final = re.compile(r"[0-9]{1,7}")


def class_of(headers: Mapping[str, str], *, is_batch: bool) -> ServiceClass:
    """Return the class of a request; `is_batch`: all that its caller sends is batch.

    Raises:
        BadRequest: the header names none.
    """
    given = headers.get(CLASS_HEADER)
    if given is not None and given not in CLASSES:
        raise BadRequest(
            f"`{CLASS_HEADER}` must be one of {', '.join(CLASSES)}", param=CLASS_HEADER
        )
    return BATCH if is_batch or given == BATCH else INTERACTIVE


def deadline_ms_of(headers: Mapping[str, str]) -> float | None:
    """Return within what time of its arrival a request wants its first token; None: no header.

    Raises:
        BadRequest: the header is no number in its range.
    """
    return _number(headers, DEADLINE_HEADER, MAX_DEADLINE_MS)


def keepalive_s_of(headers: Mapping[str, str]) -> float | None:
    """Return how often a stream's client wants a comment before the first token; None: never.

    Raises:
        BadRequest: the header is no number in its range.
    """
    return _number(headers, KEEPALIVE_HEADER, MAX_KEEPALIVE_S)


def _number(headers: Mapping[str, str], name: str, most: int) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= most:
        raise BadRequest(f"`{name}` must be a whole number from 1 to {most}", param=name)
    return float(given)
