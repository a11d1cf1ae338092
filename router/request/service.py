"""What service a request asks for: its class, by header or by its tenant; its deadline, by header.

A header can lower what the tenants' file says, not raise it. Read only where requests wait; but how
often a stream's client wants to hear that it has to wait is read everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from router.errors import BadRequest
from router.scheduling.classes import CLASSES, INTERACTIVE, ServiceClass, lower
from router.tenants import Tenant

CLASS_HEADER: Final = "x-warmroute-class"
DEADLINE_HEADER: Final = "x-warmroute-deadline-ms"
MAX_DEADLINE_MS: Final = 3_600_000

KEEPALIVE_HEADER: Final = "x-warmroute-keepalive-s"
MAX_KEEPALIVE_S: Final = 600

_NUMBER: Final = re.compile(r"[0-9]{1,7}")


def class_of(headers: Mapping[str, str], tenant: Tenant | None) -> ServiceClass:
    """Return the class of a request.

    Raises:
        BadRequest: the header names none.
    """
    given = headers.get(CLASS_HEADER)
    of_tenant = tenant.service_class if tenant is not None else INTERACTIVE
    if given is None:
        return of_tenant
    for name in CLASSES:
        if name == given:
            return lower(name, of_tenant)
    raise BadRequest(f"`{CLASS_HEADER}` must be one of {', '.join(CLASSES)}", param=CLASS_HEADER)


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
