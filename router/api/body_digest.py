"""A digest of a request's content, by which a repeated request is recognised.

SDKs send the same bytes again, except for a form's boundary. Agents write a new body: with another
order of keys, another billing header, or without streaming. So JSON is parsed, and fields that do
not decide what an engine computes are left out. A body that would take long to parse is digested as
it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import orjson

from router.api.anthropic_blocks import BILLING_HEADER
from router.api.forms import Malformed, boundary_of
from router.api.outline import AT_ONCE_MS, costs_ms

LARGE_BYTES: Final = 1 << 20
"""A larger body is not read as JSON, and is better hashed in another thread: 1 ms per MB."""

_SIZE: Final = 12
_LEFT_OUT: Final = frozenset(
    {
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "metadata",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "session_id",
        "stream",
        "stream_options",
        "user",
    }
)
"""Fields that say who asks, or how the answer is sent."""


def body_digest(body: bytes, content_type: str, *, path: str, owner: str) -> bytes:
    """Digest a request.

    Args:
        owner: Whose it is: another caller's request of the same body has another digest.
    """
    digest = blake2b(f"{owner}\0{path}\0".encode(errors="surrogatepass"), digest_size=_SIZE)
    boundary = _boundary(content_type)
    if boundary is not None:
        view, start = memoryview(body), 0
        while (found := body.find(boundary, start)) >= 0:
            digest.update(view[start:found])
            start = found + len(boundary)
        digest.update(view[start:])
    else:
        digest.update(_canonical(body) or body)
    return digest.digest()


def _boundary(content_type: str) -> bytes | None:
    """Find what separates the parts of a form; None: it is no form, or an unusual one."""
    try:
        return boundary_of(content_type)
    except Malformed:
        return None


def _canonical(body: bytes) -> bytes | None:
    """Write a JSON object as all that mean the same are written; None: it is none, or large."""
    if len(body) > LARGE_BYTES or costs_ms(body) > AT_ONCE_MS:
        return None
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(read, dict):
        return None
    fields = {name: value for name, value in read.items() if name not in _LEFT_OUT}
    system = fields.get("system")
    if isinstance(system, list):
        fields["system"] = [block for block in system if not _is_billing(block)]
    try:
        return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    except (TypeError, orjson.JSONEncodeError):  # an integer beyond 64 bits, a lone surrogate
        return None


def _is_billing(block: object) -> bool:
    text = block.get("text") if isinstance(block, Mapping) else None
    return isinstance(text, str) and text.startswith(BILLING_HEADER)
