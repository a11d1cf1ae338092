"""Answers of both ports: errors, what the log may say of our own, and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Final

from aiohttp import web

from router.api.failures import error_body, error_headers
from router.base.errors import RouterError
from router.metrics import Metrics

METRICS_HEADERS: Final = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


class InternalError(RouterError):
    """Our own bug; the log has the traceback, the client a request id."""


def error_answer(
    error: RouterError, path: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Answer an error in the shape of the API behind `path`."""
    return web.Response(
        status=error.status,
        body=error_body(error, path),
        content_type="application/json",
        headers={**(headers or {}), **error_headers(error)},
    )


async def metrics_answer(metrics: Metrics) -> web.Response:
    """Answer all metrics in Prometheus' text format."""
    return web.Response(body=await metrics.render_in_turns(), headers=METRICS_HEADERS)


def without_message(
    error: BaseException,
) -> tuple[type[InternalError], InternalError, TracebackType | None]:
    """Return where an error happened, for a log: its message may quote the request."""
    return (InternalError, InternalError(type(error).__name__), error.__traceback__)
