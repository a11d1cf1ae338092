"""Client keys and tenants.

    file         the tenants' file: its fields, their ranges; new keys and tenants    `read`, `add`
    tenants      whose request it is; the file in force, and its reloads              `Tenants`

No I/O but reading the file; now is an argument. A key is never kept, only its digest, and neither
leaves this package: to the other packages a tenant is a caller (`router.base.caller`).
"""

from router.tenants.tenants import Tenants

__all__ = ["Tenants"]
