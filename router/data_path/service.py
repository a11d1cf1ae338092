"""What service a request asks for: its class, by header or by its tenant.

A header can lower what the tenants' file says, not raise it. Read only where requests wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.errors import BadRequest
from router.scheduling.classes import CLASSES, INTERACTIVE, ServiceClass, lower
from router.tenants import Tenant

CLASS_HEADER: Final = "x-warmroute-class"


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
