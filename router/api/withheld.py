"""Fields and headers that clients must not send to an engine.

They are for routers, disaggregated prefill and operators. An engine obeys them: it fetches blocks
from the address in `kv_transfer_params` and uses the token ids in it. `vllm_xargs` reach connectors
and samplers, `priority` overtakes other requests, a rank overrides the router's choice.
Source: vLLM 0.32.0, entrypoints/*/protocol.py, entrypoints/generate/base/serving.py.

In JSON they are removed silently, so clients that always send `priority` still work. They are
refused if they cannot be removed: in a form (audio), inside `sampling_params`, or in a body that is
not parsed whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from router.api.body_fields import without_fields
from router.api.forms import Malformed, parts_of_form
from router.api.outline import EXTRA_ARGS, Outline
from router.base.errors import BadRequest

FIELDS: Final = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority")
"""What `forward.client_fields` may let through."""

PREFIX: Final = "x-warmroute-"
"""Headers that begin so are the router's own."""

_RANK_HEADER: Final = "x-data-parallel-rank"
_PRIORITY_HEADER: Final = "x-vllm-priority"


class Withheld:
    """What is taken out. `allowed`: those of FIELDS that stay."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self.fields = tuple(name for name in FIELDS if name not in allowed)
        self._fields = frozenset(self.fields)
        self.headers = frozenset(
            {_RANK_HEADER} | ({_PRIORITY_HEADER} if "priority" in self._fields else set())
        )

    def strip(self, body: bytes, view: dict[str, Any]) -> bytes:
        """Remove the fields from a JSON object and from `view`, which is the same decoded.

        Raises:
            BadRequest: one of them is where it cannot be taken out.
        """
        sampling = view.get("sampling_params")  # of /inference/v1/generate
        if type(sampling) is dict and "extra_args" in sampling and "vllm_xargs" in self._fields:
            raise _refused(EXTRA_ARGS, "vllm_xargs")
        if self._fields.isdisjoint(view):
            return body
        for name in self.fields:
            view.pop(name, None)
        return without_fields(body, self.fields)

    def check_outline(self, outline: Outline) -> None:
        """Refuse a body that has one of the fields and is too costly to be taken apart.

        Raises:
            BadRequest: it has one.
        """
        for name in outline.withheld:
            field = "vllm_xargs" if name == EXTRA_ARGS else name
            if field in self._fields:
                raise _refused(name, field)

    def check_form(self, body: bytes, content_type: str) -> None:
        """Refuse a form with the field `vllm_xargs`, the only one of the fields that forms know.

        Raises:
            BadRequest: a part has this name, or the form is unusual (see router.api.forms).
        """
        if "vllm_xargs" not in self._fields:
            return
        try:
            if any(part.name == b"vllm_xargs" for part in parts_of_form(body, content_type)):
                raise _refused("vllm_xargs", "vllm_xargs")
        except Malformed as exc:
            raise BadRequest(
                f"send a multipart/form-data form in UTF-8: {exc}", param="Content-Type"
            ) from exc


def _refused(param: str, name: str) -> BadRequest:
    return BadRequest(
        f"`{param}` is not for clients; an operator can allow `{name}` in `forward.client_fields`",
        param=param,
    )
