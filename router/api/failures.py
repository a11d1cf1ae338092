"""Errors in each API's own JSON, as a whole answer and as an event inside a stream.

Source: vLLM 0.32 entrypoints/serve/exception_handling (OpenAI routes: `code` is the status) and
Anthropic's error object for `/v1/messages`.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from router.base.errors import (
    MethodNotAllowed,
    NoReplicaAvailable,
    Overloaded,
    RequestKills,
    RetryLater,
    RouterError,
    ShuttingDown,
)

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_MOST_BYTES = 1_000  # of what is no error of an API


def error_body(error: RouterError, path: str) -> bytes:
    """Write `error` as the API behind `path` would."""
    if path.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.status,
            }
        }
    )


def error_event(error: RouterError, path: str) -> bytes:
    """Write `error` as a server-sent event."""
    body = error_body(error, path)
    if path.startswith("/v1/responses"):
        body = _of_responses(orjson.loads(body), error.code, error.message, error.param)
    return _event(body, path)


def engine_error_event(body: bytes, path: str) -> bytes:
    """Write the body of an engine's error as a server-sent event of its API.

    One that is no JSON object with an error in it goes out as a message.
    """
    try:
        found = orjson.loads(body)
        error = found["error"]
        message, code, param = error["message"], error.get("code"), error.get("param")
    except (ValueError, TypeError, KeyError, AttributeError):
        message, code, param = body[:_MOST_BYTES].decode(errors="replace"), None, None
        found = {"error": {"message": message, "type": "BadGatewayError"}}
    if path.startswith("/v1/responses"):
        return _event(_of_responses(found, code, message, param), path)
    return _event(orjson.dumps(found), path)


def _of_responses(body: dict[str, Any], code: Any, message: Any, param: Any) -> bytes:
    """Write an error for the Responses API: its clients look for `type`, OpenAI's for `error`."""
    return orjson.dumps({"type": "error", "code": code, "message": message, "param": param} | body)


def _event(body: bytes, path: str) -> bytes:
    """Write an error's body, of one line, as an event; the empty line first ends a broken one."""
    named = path.startswith(("/v1/messages", "/v1/responses"))
    return b"\n\n" + (b"event: error\n" if named else b"") + b"data: " + body + b"\n\n"


def error_headers(error: RouterError) -> dict[str, str]:
    """Return the headers that belong to the answer."""
    if isinstance(error, RetryLater | NoReplicaAvailable):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, MethodNotAllowed):
        return {"Allow": error.allowed}
    if isinstance(error, RequestKills):
        return {"x-should-retry": "false"}  # OpenAI's and Anthropic's SDKs heed it
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | ShuttingDown):
        return {"Retry-After": "1"}
    return {}
