"""Client keys, tenants, their limits and their cache salts.

    file      the tenants' file: its fields, their ranges; what is wrong with one     `read`
    keys      new keys, and their digests
    entries   adding a tenant with a new key to the file                            `add`
    salts     a salt for each tenant, and for each of its users
    bucket    a token bucket
    accounts  what each tenant has used, here and at other routers                    `Accounts`
    tenants   whose request it is; the file in force, and its reloads                 `Tenants`

No I/O but reading the file; now is an argument. A key is never kept, only its digest, and neither
leaves this package: outside it a tenant is its name.
"""

from router.tenants.accounts import Accounts, Charge
from router.tenants.tenants import Tenant, Tenants

__all__ = ["Accounts", "Charge", "Tenant", "Tenants"]
