"""What service a request asks for: its class, by header or by its tenant; its deadline, by header.

A header can lower what the tenants' file says, not raise it. Read only where requests wait.
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
    given = headers.get(DEADLINE_HEADER)
    if given is None:
        return None
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= MAX_DEADLINE_MS:
        raise BadRequest(
            f"`{DEADLINE_HEADER}` must be a whole number from 1 to {MAX_DEADLINE_MS}",
            param=DEADLINE_HEADER,
        )
    return float(given)
