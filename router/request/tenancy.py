"""A request as its tenant's: the models it may name, the cache it may use, what it is charged.

    apply    when it is read: its model is allowed; its blocks get the tenant's salt
    charge   when it is admitted: the uncached tokens it is expected to have, or 429
    settle   at its end: what it really had

Without a tenant nothing happens. The salt goes into the body that engines get and into our own
block hashes alike, so that what is known of caches stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace
from multidict import CIMultiDict

from router.api.body_fields import with_fields
from router.api.usage import Usage
from router.errors import BadRequest, UnknownModel, UnsupportedBody
from router.request.job import Choice, Job, Placement
from router.tenants import Tenant

_SALT: Final = "cache_salt"
_BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens are not known
_NO_CACHE: Final = ("/tokenize", "/detokenize", "/count_tokens")
"""Ends of routes that compute nothing, so need no salt."""


def owner_of(tenant: Tenant | None) -> str:
    """Name whose prompts a prompt is remembered with: those of the same tenant's cache."""
    return (tenant.salt or "") if tenant is not None else ""


def apply(job: Job, body: Mapping[str, Any] | None) -> None:
    """Hold a request to its tenant's models, and put the tenant's salt into its body.

    Args:
        job: Its model is known.
        body: As decoded; None: it is no JSON, or there is none.

    Raises:
        UnknownModel: the model is not the tenant's.
        BadRequest: no model is named, or what is sent as `cache_salt` is none.
        UnsupportedBody: the body cannot be salted, so the engine's cache would be everybody's.
    """
    tenant = job.tenant
    if tenant is None or not job.inbound.body:
        return
    check_model(tenant, job.model)
    if job.inbound.path.endswith(_NO_CACHE):
        return
    if body is None:
        if tenant.salt is None:
            return
        raise UnsupportedBody(
            "the body must be an uncompressed JSON object, because the tenant has its own cache"
        )
    salt = tenant.salted(body.get(_SALT))
    if salt is None:
        return
    job.inbound = replace(job.inbound, body=with_fields(job.inbound.body, {_SALT: salt}))
    if job.prompt is not None:
        job.extra = replace(job.extra, cache_salt=salt)


def check_model(tenant: Tenant, model: str | None) -> None:
    """Hold a request to its tenant's models.

    Raises:
        UnknownModel, BadRequest: as `apply`.
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


def charge(job: Job, choice: Choice, now_s: float) -> None:
    """Charge a request's tenant once for the uncached tokens of the first decision.

    Raises:
        RateLimited: there are not so many left this minute.
    """
    if job.tenant is None or job.charge is not None:
        return
    if job.tokens is None:
        num_tokens = len(job.inbound.body or b"") // _BYTES_PER_TOKEN
    else:
        num_own = max(choice.view.num_gpu_tokens, choice.view.num_cpu_tokens)
        num_tokens = max(job.num_tokens - num_own - choice.num_pool_tokens, 0)
        num_tokens += job.num_more_tokens
    job.charge = job.tenant.account.charge(num_tokens, now_s)


def refund(job: Job, now_s: float) -> None:
    """Take the charge back: no replica answered."""
    if job.charge is not None:
        job.charge.settle(0, now_s)


def settle(job: Job, placement: Placement, status: int, usage: Usage | None, now_s: float) -> None:
    """Correct the charge by what the engine reported; what it refused costs nothing."""
    if job.charge is None:
        return
    if status >= 400:
        job.charge.settle(0, now_s)
    elif usage is not None:
        num_cached = usage.num_cached_tokens
        if job.prefill is not None and job.prefill.result == "remote":
            num_cached = job.prefill.num_reported_cached_tokens or 0  # computed there
        if num_cached is None:
            num_cached = placement.num_cached_tokens
        job.charge.settle(max(usage.prompt_tokens - num_cached, 0), now_s)


def say_limits(headers: CIMultiDict[str], job: Job, now_s: float) -> None:
    """Add what is left of the tenant's limits to an answer's headers."""
    if job.tenant is not None:
        headers.update(job.tenant.account.headers(now_s))
