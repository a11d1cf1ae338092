"""Which requests may be sent twice: those that only compute an answer.

Inference that keeps nothing gives the same answer wherever and however often it is asked.
Everything else may change something where it arrives (files, batches, adapters, stored responses),
and a connection that broke does not show whether it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # Source: RFC 9110 section 9.2.1

# Source: vLLM 0.32 entrypoints/*/api_router.py, routes that compute and keep nothing.
_COMPUTING: Final = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/detokenize",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
    }
)


def has_side_effects(method: str, path: str, body: Mapping[str, Any] | None) -> bool:
    """Return whether sending the request twice may not be the same as sending it once.

    A response that is computed in the background, or that was asked to be stored, stays where it
    was computed.
    """
    if method in _SAFE_METHODS:
        return False
    if method != "POST" or path.rstrip("/") not in _COMPUTING:
        return True
    if path.rstrip("/") == "/v1/responses" and body is not None:
        return body.get("background") is True or body.get("store") is True
    return False
