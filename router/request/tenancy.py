"""A request as its tenant's: the models it may name, the cache it may use, what it is charged.

    salted   when it is read: its model is allowed; its blocks get the tenant's salt
    charge   when it is placed: the uncached tokens it is expected to have, or 429
    settle   at its end: the uncached tokens it really had

Without a tenant nothing happens. The salt goes into both the body that engines get and our own
block hashes, so predictions stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

from msgspec.structs import replace

from router.api.body_fields import with_fields
from router.api.usage import Usage
from router.base.errors import BadRequest, UnknownModel, UnsupportedBody
from router.request.plan import Placement, Plan
from router.request.results import Inbound, Prompt, Tries
from router.tenants import Charge, Tenant

_SALT: Final = "cache_salt"
_BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens are not known
_NO_CACHE: Final = ("/tokenize", "/detokenize", "/count_tokens")
"""Ends of routes that compute nothing, so need no salt."""


def salted(
    inbound: Inbound, model: str | None, body: Mapping[str, Any] | None
) -> tuple[Inbound, str | None]:
    """Hold a request to its tenant's models, and put the tenant's salt into its body.

    Args:
        inbound: The request.
        model: The model that it names.
        body: As decoded; None: it is no JSON, or there is none.

    Returns:
        The request to forward, and the salt. None: it is not changed.

    Raises:
        UnknownModel: the model is not the tenant's.
        BadRequest: no model is named, or what is sent as `cache_salt` is none.
        UnsupportedBody: the body cannot be salted, so the engine's cache would be everybody's.
    """
    tenant = inbound.tenant
    assert tenant is not None
    if not inbound.body:
        return inbound, None
    check_model(tenant, model)
    if inbound.path.endswith(_NO_CACHE):
        return inbound, None
    if body is None:
        if tenant.salt is None:
            return inbound, None
        raise UnsupportedBody(
            "the body must be an uncompressed JSON object, because the tenant has its own cache"
        )
    salt = tenant.salted(body.get(_SALT))
    if salt is None:
        return inbound, None
    return replace(inbound, body=with_fields(inbound.body, {_SALT: salt})), salt


def check_model(tenant: Tenant, model: str | None) -> None:
    """Hold a request to its tenant's models.

    Raises:
        UnknownModel, BadRequest: as `salted`.
    """
    if tenant.may_use(model):
        return
    allowed = ", ".join(sorted(tenant.models or ()))
    if model is None:
        raise BadRequest(f"name a `model`: {allowed}", param="model")
    raise UnknownModel(
        f"The model `{model}` does not exist or you do not have access to it (yours: {allowed}).",
        param="model",
    )


def charge(tenant: Tenant, prompt: Prompt, plan: Plan, now_s: float) -> Charge:
    """Charge a request's tenant for the uncached tokens of a plan.

    Raises:
        RateLimited: the tenant has not so many left this minute.
    """
    if prompt.tokens is None:
        num_tokens = len(prompt.read.inbound.body or b"") // _BYTES_PER_TOKEN
    else:
        num_tokens = max(prompt.num_tokens - plan.view.num_cached_tokens, 0)
        num_tokens += prompt.num_more_tokens
    return tenant.account.charge(num_tokens, now_s)


def settle(
    charge: Charge, tries: Tries, placement: Placement, status: int, usage: Usage | None
) -> None:
    """Correct a charge by what the engine reported; a refused request costs nothing."""
    now_s = monotonic()
    if status >= 400:
        charge.settle(0, now_s)
    elif usage is not None:
        num_cached = usage.num_cached_tokens
        if tries.helped is not None and tries.helped.result == "remote":
            num_cached = tries.helped.num_reported_cached_tokens or 0  # computed there
        if num_cached is None:
            num_cached = placement.predicted.num_cached_tokens
        charge.settle(max(usage.prompt_tokens - num_cached, 0), now_s)
