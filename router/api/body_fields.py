"""Top-level fields of a JSON body, taken out or put in without touching another byte.

White space, order, numbers and escapes of the client stay. Only the named members are removed, each
with one comma. A key is compared as JSON means it ("\u006eame" is "name"). Every occurrence of a
repeated key is removed, so it does not matter which one an engine would take.

msgspec finds the members. It skips other values in C without building them, and returns a value as
a view into the body. The view's address tells where the value is. This takes about 1 µs per KB, and
3 ms per MB at worst (bodies of only brackets or keys).

Fields and headers that clients must not send to an engine.

They are for routers, disaggregated prefill and operators. An engine obeys them: it fetches blocks
from the address in `kv_transfer_params` and uses the token ids in it. `vllm_xargs` reach connectors
and samplers, `priority` overtakes other requests, a rank overrides the router's choice.
Source: vLLM 0.32.0, entrypoints/*/protocol.py, entrypoints/generate/base/serving.py.

In JSON they are removed silently, so clients that always send `priority` still work. They are
refused if they cannot be removed: in a form (audio), inside `sampling_params`, or in a body that is
not parsed whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from msgspec import UNSET, Raw, UnsetType

from router.api.fields import EXTRA_ARGS, Outline
from router.api.forms import Malformed, parts_of_form
from router.base.errors import BadRequest

_SPACE: Final = b" \t\r\n"
_NOT_SPACE: Final = re.compile(rb"[^ \t\r\n]")
_WINDOW: Final = 4096
_MOST_OCCURRENCES: Final = 8  # of one key; each costs a pass over the body


def without_fields(body: bytes, names: Iterable[str]) -> bytes:
    """Remove the named members of the outermost object; without any of them it is `body` itself.

    Raises:
        BadRequest: the body is no JSON object, is nested too deep, or repeats a key too often.
    """
    members = _members(tuple(names))
    left: bytes | bytearray = body
    for _ in range(_MOST_OCCURRENCES + 1):
        spans = _last_occurrences(left, members)
        if not spans:
            return bytes(left)
        left = bytearray(left) if isinstance(left, bytes) else left
        for start, end in sorted(spans.values(), reverse=True):  # what is to the left stays put
            _cut(left, start, end)
    name = next(iter(spans))
    raise BadRequest(f"`{name}` occurs more than {_MOST_OCCURRENCES} times", param=name)


def with_fields(body: bytes, values: Mapping[str, Any]) -> bytes:
    """Set members of the outermost object, first in it, in place of those of the same names.

    Raises:
        BadRequest: as `without_fields`.
    """
    left = without_fields(body, values)
    if not values:
        return left
    start = _next(left, 0) + 1  # behind the bracket
    is_empty = left[_next(left, start)] == ord("}")
    members = orjson.dumps(dict(values))[1:-1]
    return b"".join((left[:start], members, b"" if is_empty else b",", left[start:]))


class _Members(NamedTuple):
    """A decoder for some members, and the attribute that has each of them."""

    decoder: msgspec.json.Decoder[Any]
    attributes: tuple[tuple[str, str], ...]  # (name, attribute)


@lru_cache(maxsize=64)
def _members(names: tuple[str, ...]) -> _Members:
    attributes = tuple((name, f"f{number}") for number, name in enumerate(dict.fromkeys(names)))
    fields = [(attribute, Raw | UnsetType, UNSET) for _, attribute in attributes]
    rename = {attribute: name for name, attribute in attributes}
    struct = msgspec.defstruct("Members", fields, rename=rename)
    return _Members(msgspec.json.Decoder(struct), attributes)


def _last_occurrences(body: bytes | bytearray, members: _Members) -> dict[str, tuple[int, int]]:
    """Find the last member of each name: from its key's first byte to behind its value's last."""
    try:
        values = members.decoder.decode(body)
    except msgspec.DecodeError as exc:
        raise BadRequest(f"the body is not a JSON object: {exc}") from exc
    except RecursionError as exc:
        raise BadRequest("the body is nested too deep") from exc
    found: dict[str, tuple[int, int]] = {}
    for name, attribute in members.attributes:
        value = getattr(values, attribute)
        if value is not UNSET:
            start = address_of(value) - address_of(body)
            end = start + memoryview(value).nbytes
            found[name] = (_key_start(body, start), end)
    return found


def address_of(buffer: Any) -> int:
    """Return where in memory a buffer begins."""
    import numpy as np  # late: no command but those that serve needs it, and it takes 0.1 s

    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _key_start(body: bytes | bytearray, value: int) -> int:
    """Go back from a value to its key. No name has a quote in it, nor then its key's spelling."""
    return body.rindex(b'"', 0, body.rindex(b'"', 0, value))


def _cut(body: bytearray, start: int, end: int) -> None:
    """Remove a member and the comma behind it; of the last one the comma before it."""
    behind = _next(body, end)
    if body[behind] == ord(","):
        end = behind + 1
    else:
        before = _previous(body, start)
        if body[before] == ord(","):
            start = before
    del body[start:end]


def _next(body: bytes | bytearray, index: int) -> int:
    """Go from `index` to the first byte that is no white space."""
    found = _NOT_SPACE.search(body, index)
    assert found is not None
    return found.start()


def _previous(body: bytearray, index: int) -> int:
    """Go back from before `index` to the first byte that is no white space."""
    while not (window := body[max(0, index - _WINDOW) : index].rstrip(_SPACE)):
        index -= _WINDOW
    return max(0, index - _WINDOW) + len(window) - 1


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
