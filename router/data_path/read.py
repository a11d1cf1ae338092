"""Stage 1: a body as far as routing needs it; whole where that is quick, else its outline."""

from __future__ import annotations

from typing import Any

import orjson

from router.api.outline import AT_ONCE_MS, LARGE_BYTES, SMALL_BYTES, Outline, costs_ms
from router.api.outliner import Outliner
from router.data_path.job import Inbound
from router.errors import BadRequest


class BodyReader:
    """Reads bodies without holding up the loop for more than some 20 ms."""

    __slots__ = ("_outliner",)

    def __init__(self, outliner: Outliner) -> None:
        self._outliner = outliner

    async def read(self, inbound: Inbound) -> dict[str, Any] | Outline | None:
        """Read a body. What an engine would read as JSON, but we do not, never gets to it.

        Raises:
            BadRequest: the body has to be a JSON object and is none, or is nested too deep.
            PayloadTooLarge, Overloaded: as `Outliner.outline`.
        """
        body = inbound.body
        if body is None:
            return None
        if len(body) > SMALL_BYTES and not _is_quick(body):
            outline = await self._outliner.outline(body)
            if not outline.is_cheap:
                if outline.wrong is None:
                    return outline
                if not inbound.needs_json:
                    return None
                raise BadRequest(f"the body is no JSON object: {outline.wrong}")
        return _whole(inbound)


def _is_quick(body: bytes) -> bool:
    return len(body) <= LARGE_BYTES and costs_ms(body) <= AT_ONCE_MS


def _whole(inbound: Inbound) -> dict[str, Any] | None:
    assert inbound.body is not None
    try:
        body = orjson.loads(inbound.body)
    except orjson.JSONDecodeError as exc:
        if not inbound.needs_json:
            return None
        raise BadRequest(f"the body is not JSON, or nested deeper than 1,024: {exc}") from exc
    if isinstance(body, dict):
        return body
    if not inbound.needs_json:
        return None
    raise BadRequest("the body must be a JSON object")
