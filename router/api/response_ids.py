"""The ids of responses: where a request names one, and where an answer brings one.

Source: vLLM 0.32.0, entrypoints/openai/responses/api_router.py and serving.py (a stream begins with
`response.created`, a whole answer with its `id`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from router.api.routes import RESPONSE_PATH

_HEAD_BYTES: Final = 4096
_ID: Final = rb'"id"\s*:\s*"([A-Za-z0-9_-]{1,128})"'
_IN_BODY: Final = re.compile(rb"\s*\{\s*" + _ID)
_IN_EVENT: Final = re.compile(rb'"response"\s*:\s*\{\s*' + _ID)
_NAMED: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")

CREATE: Final = "/v1/responses"


def named_in(path: str, body: Mapping[str, Any] | None) -> str | None:
    """Find the id of the response that a request is about, or goes on from."""
    found = RESPONSE_PATH.fullmatch(path)
    if found is not None:
        return found[1]
    named = body.get("previous_response_id") if path == CREATE and body is not None else None
    return named if isinstance(named, str) and _NAMED.fullmatch(named) else None


def is_kept(body: Mapping[str, Any]) -> bool:
    """Return whether an engine may keep the response that it is asked for.

    An id that the client chose does not count: another client may have chosen the same.
    """
    return body.get("store", True) is not False and body.get("request_id") is None


def issued_in(beginning: bytes, *, is_event_stream: bool) -> str | None:
    """Find the id of the response that an answer begins."""
    head = beginning[:_HEAD_BYTES]
    found = _IN_EVENT.search(head) if is_event_stream else _IN_BODY.match(head)
    return found[1].decode() if found is not None else None
