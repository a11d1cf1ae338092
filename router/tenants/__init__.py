"""Client keys and tenants.

    tenants      the tenants' file, new keys and tenants; whose request it is       `Tenants`

No I/O but reading the file; now is an argument. A key is never kept, only its digest, and neither
leaves this package: to the other packages a tenant is a caller (`router.base.caller`).
"""

from router.tenants.tenants import Tenants

__all__ = ["Tenants"]
