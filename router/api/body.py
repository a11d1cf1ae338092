"""Read bodies as leniently as vLLM reads them, and change them without touching another byte.

    fields     of a decoded JSON body. Errors name the field, the type that it must have, and the
               type that came.
    outline    the fields that routing needs of a body with too many values to parse whole. A JSON
               parser holds the event loop while it runs: 1 s for 23 MB of small keys. `costs_ms`
               bounds that time by counting bytes. msgspec skips the values of other fields without
               building them: 30 to 55 ms for 20 MB of small values, 5 to 20 ms for text.
    forms      multipart/form-data: audio, images. Only forms that every reader reads in the same
               way are accepted, so that a field cannot hide:

               body         for each part: "--" boundary CRLF head CRLF CRLF content CRLF
                            in the end: "--" boundary "--"
               head         lines `token: value`, one of them a Content-Disposition
               disposition  `form-data`, one `name` without escapes, perhaps `filename` and
                            `filename*`

               Searching 25 MB takes 20 to 60 ms, so large forms are searched in another thread, in
               slices between which the event loop runs.
    encodings  vLLM 0.32 does not look at Content-Encoding: it takes a body for JSON as it is. So a
               compressed body of a request is refused. A compressed answer, of a proxy in front of
               an engine, passes unread.
    members    top-level members of a JSON body are removed or put in. White space, order, numbers
               and escapes of the client stay. A key is compared as JSON means it. Every occurrence
               of a repeated key is removed, so it does not matter which one an engine would take.
               msgspec finds the members and returns views into the body, whose addresses tell where
               they are. This takes about 1 µs per KB, 3 ms per MB at worst (only brackets or keys).
    withheld   fields and headers that clients must not send to an engine: they are for routers,
               disaggregated prefill and operators. An engine obeys them: it fetches blocks from the
               address in `kv_transfer_params` and uses the token ids in it. `vllm_xargs` reach
               connectors and samplers, `priority` overtakes other requests, a rank overrides the
               router's choice. In JSON they are removed silently, so clients that always send
               `priority` still work. They are refused if they cannot be removed: in a form, inside
               `sampling_params`, or in a body that is not parsed whole.

Errors never quote the body. Source of the withheld fields: vLLM 0.32.0, entrypoints/*/protocol.py,
entrypoints/generate/base/serving.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
import orjson
from msgspec import UNSET, Raw, Struct, UnsetType

from router.base.errors import BadRequest

Body = Mapping[str, Any]
"""A decoded JSON object."""

TRUE = frozenset({"true", "1", "yes", "y", "on", "t"})
_FALSE = frozenset({"false", "0", "no", "n", "off", "f"})


def text_of(body: Body, field: str) -> str | None:
    """Return a text."""
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        wrong(field, "a string", value)
    return value


def int_of(body: Body, field: str) -> int | None:
    """Return a number; as in the engine, a text may have it."""
    value = body.get(field)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            wrong(field, "an integer", value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is not None and not isinstance(value, int):
        wrong(field, "an integer", value)
    return value


def bool_of(body: Body, field: str, default: bool, *, nullable: bool = False) -> bool:
    """Return a switch; as in the engine, 0, 1 and words such as "yes" are switches, too."""
    value = body.get(field, default)
    if isinstance(value, bool):
        return value
    if value is None and nullable:
        return default
    if value in (0.0, 1.0):
        return bool(value)
    word = str(value).lower() if isinstance(value, str | int) else ""
    if word not in TRUE and word not in _FALSE:
        wrong(field, "true or false", value)
    return word in TRUE


def object_of(body: Body, field: str) -> Body | None:
    """Return an object."""
    value = body.get(field)
    if value is not None and not isinstance(value, dict):
        wrong(field, "an object", value)
    return value


def objects_of(body: Body, field: str) -> Sequence[Body] | None:
    """Return a list of objects."""
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, list):
        wrong(field, "a list of objects", value)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            wrong(f"{field}[{index}]", "an object", item)
    return value


_JSON_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def wrong(param: str, expected: str, value: object, *, missing: bool = False) -> NoReturn:
    """Raise the error for a field that is missing or of the wrong type."""
    got = "it is missing" if missing else f"got {_JSON_NAMES.get(type(value), 'something else')}"
    raise BadRequest(f"`{param}` must be {expected}; {got}", param=param)


SMALL_BYTES: Final = 256 * 1024
"""Bodies up to this are parsed at once: 10 ms if they are only keys, else less than 1 ms."""

LARGE_BYTES: Final = 8 * 1024 * 1024
"""Bodies beyond this are outlined: parsing 30 MB of text takes 50 to 70 ms."""

AT_ONCE_MS: Final = 40.0
"""Bodies with a higher bound are outlined. Colons and commas in texts count, too: 2.5 MB of code
have this bound."""

MOST_MS: Final = 400.0
"""Bodies with a higher bound are refused, because even an outline would hold the loop for too long.
A prompt of 6 million token ids has this bound."""

_US_PER_COLON: Final = 0.5  # a key and its place in an object; measured, as the others, on 2 GHz
_US_PER_COMMA: Final = 0.06
_US_PER_BRACKET: Final = 0.15
_SMALL_FIELD: Final = 4096  # bytes of JSON; longer fields are left out


class Outline(Struct, frozen=True, kw_only=True):
    """The short top-level fields of a body, and the withheld ones that it has."""

    fields: dict[str, Any] = {}
    withheld: tuple[str, ...] = ()


class _Sketch(Struct, frozen=True, kw_only=True):
    """The fields of interest as views into the body; an absent one is empty."""

    model: Raw = Raw()
    stream: Raw = Raw()
    stream_options: Raw = Raw()
    n: Raw = Raw()
    max_tokens: Raw = Raw()
    max_completion_tokens: Raw = Raw()
    truncate_prompt_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    truncation: Raw = Raw()
    cache_salt: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    previous_response_id: Raw = Raw()
    request_id: Raw = Raw()
    store: Raw = Raw()
    background: Raw = Raw()
    metadata: Raw = Raw()
    kv_transfer_params: Raw = Raw()
    ec_transfer_params: Raw = Raw()
    vllm_xargs: Raw = Raw()
    priority: Raw = Raw()
    sampling_params: Raw = Raw()


class _Sampling(Struct):
    extra_args: Raw = Raw()


_WITHHELD: Final = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority")
EXTRA_ARGS: Final = "sampling_params.extra_args"
_OTHERS: Final = frozenset({"sampling_params", *_WITHHELD})
_FIELDS: Final = tuple(name for name in _Sketch.__struct_fields__ if name not in _OTHERS)
_sketch = msgspec.json.Decoder(_Sketch)


def make_outline(body: bytes) -> Outline:
    """Outline a body.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        return _outlined(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc


def _outlined(body: bytes) -> Outline:
    sketch = _sketch.decode(body)
    fields = {
        name: msgspec.json.decode(raw)
        for name in _FIELDS
        if 0 < memoryview(raw := getattr(sketch, name)).nbytes <= _SMALL_FIELD
    }
    withheld = [name for name in _WITHHELD if memoryview(getattr(sketch, name)).nbytes]
    if bytes(memoryview(sketch.sampling_params)[:1]) == b"{":
        sampling = msgspec.json.decode(sketch.sampling_params, type=_Sampling)
        withheld += [EXTRA_ARGS] if memoryview(sampling.extra_args).nbytes else []
    return Outline(fields=fields, withheld=tuple(withheld))


def costs_ms(body: bytes) -> float:
    """Bound the time of parsing a body whole, by counting its bytes (0.4 ms a megabyte)."""
    import numpy as np  # late: `--help` takes 0.1 s less

    bytes_of = np.frombuffer(body, np.uint8)
    num_colons, num_commas, num_brackets = (
        int(np.count_nonzero(bytes_of == byte)) for byte in b":,["
    )
    us = num_colons * _US_PER_COLON + num_commas * _US_PER_COMMA + num_brackets * _US_PER_BRACKET
    return us / 1000


MAX_PARTS: Final = 1_000
"""Source: Starlette takes as many fields."""

SMALL_FORM_BYTES: Final = 1 << 20
"""Forms up to this are searched at once, in about 2 ms."""

_SLICE_BYTES: Final = 1 << 20
_MAX_HEAD_BYTES: Final = 4_096
_MAX_NAME_BYTES: Final = 512
_MAX_BOUNDARY: Final = 256
_FIELD: Final = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([^\r\n]*)")
_OPTION: Final = re.compile(
    rb';[ \t]*([A-Za-z]+\*?)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^";\s]*))[ \t]*'
)
_OPTIONS_OF_PARTS: Final = frozenset({b"name", b"filename", b"filename*"})
_CHARSETS: Final = (b"utf-8", b"utf8")


class Malformed(Exception):
    """Readers may differ about the form, or vLLM refuses it."""


class FormPart(Struct, frozen=True, kw_only=True):
    """A part of a form; `start` and `end` of its content in the body."""

    name: bytes
    is_file: bool
    start: int
    end: int


def is_form(content_type: str) -> bool:
    """Return whether a body of this type is a multipart form."""
    return content_type.lstrip()[:20].lower().startswith("multipart/form-data")


def model_of_form(body: bytes, content_type: str) -> str | None:
    """Return the model that a form names; None: it names none, or not clearly."""
    found = None
    try:
        for part in parts_of_form(body, content_type):
            if part.name != b"model":
                continue
            if part.is_file or part.end - part.start > _MAX_NAME_BYTES:
                return None
            found = body[part.start : part.end]
        return found.decode() if found else None
    except (Malformed, UnicodeDecodeError):
        return None


def parts_of_form(body: bytes, content_type: str) -> Iterator[FormPart]:
    """Yield a form's parts.

    Raises:
        Malformed: the body is not such a form.
    """
    delimiter = b"\r\n--" + boundary_of(content_type)
    if not body.startswith(delimiter[2:]):
        raise Malformed("it does not begin with its boundary")
    at = len(delimiter) - 2
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return
        if not body.startswith(b"\r\n", at):
            raise Malformed("its boundary is not followed by a line end")
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        if head_end < 0:
            raise Malformed("the head of a part does not end")
        name, is_file = _read_head(body[at + 2 : head_end])
        start, end = head_end + 4, _find(body, delimiter, head_end + 4)
        yield FormPart(name=name, is_file=is_file, start=start, end=end)
        at = end + len(delimiter)
    raise Malformed(f"it has more than {MAX_PARTS} parts")


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a form.

    Raises:
        Malformed: the type is another one, or has other options than a boundary and UTF-8.
    """
    kind, options = _options(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data":
        raise Malformed("it is not multipart/form-data")
    if options.get(b"charset", b"utf-8").lower() not in _CHARSETS or b"charset*" in options:
        raise Malformed("it is not in UTF-8")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii() or b"\\" in boundary:
        raise Malformed("its Content-Type has no boundary")
    return boundary


def _read_head(head: bytes) -> tuple[bytes, bool]:
    """Return a part's name, and whether it is a file."""
    dispositions = []
    for line in head.split(b"\r\n"):
        field = _FIELD.fullmatch(line)
        if field is None:
            raise Malformed("the head of a part is not a list of header fields")
        if field[1].lower() == b"content-disposition":
            dispositions.append(field[2])
    if len(dispositions) != 1:
        raise Malformed("a part does not have one Content-Disposition")
    kind, options = _options(dispositions[0])
    name = options.pop(b"name", None)
    if kind != b"form-data" or name is None or b"\\" in name or options.keys() - _OPTIONS_OF_PARTS:
        raise Malformed("a part does not have one plain name")
    return name, bool(options)


def _options(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Split a header's value into its kind, in lower case, and its options.

    Raises:
        Malformed: it is not a list of different options.
    """
    at = header.find(b";") if b";" in header else len(header)
    kind = header[:at].strip(b" \t").lower()
    options: dict[bytes, bytes] = {}
    while at < len(header):
        option = _OPTION.match(header, at)
        if option is None or option[1].lower() in options:
            raise Malformed("a header has an option twice, or an unusual one")
        options[option[1].lower()] = option[3] if option[2] is None else option[2]
        at = option.end()
    return kind, options


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Find a delimiter in slices: each holds the interpreter for 1 or 2 ms."""
    while start < len(body):
        end = body.find(delimiter, start, start + _SLICE_BYTES + len(delimiter))
        if end >= 0:
            return end
        start += _SLICE_BYTES
    raise Malformed("it is cut off")


# Source: orjson 3.10 to 3.13 and msgspec 0.22; the first that a message contains goes.
_REASONS: Final = (
    ("depth", "the body is nested deeper than 1,024"),
    ("recursion", "the body is nested deeper than 1,024"),
    ("not valid UTF-8", "the body is not valid UTF-8"),
    ("utf-8' codec", "the body is not valid UTF-8"),
    ("surrogate", "a string in the body has half of a surrogate pair, which is no character"),
    ("control character", "a string in the body has a control character that is not escaped"),
    ("unexpected content after", "the body goes on after its JSON object"),
    ("trailing characters", "the body goes on after its JSON object"),
    ("end of data", "the body ends before its JSON does"),
    ("truncated", "the body ends before its JSON does"),
)


_MAYBE_NAN: Final = ("expected a JSON value", "unexpected character", "no digit after")


def why_not_json(reason: str) -> str:
    """Word what a JSON decoder objected to.

    Args:
        reason: Its message.
    """
    for part, words in _REASONS:
        if part in reason:
            return f"{words}: {reason}"
    if any(part in reason for part in _MAYBE_NAN):
        return f"the body is not JSON (which has no NaN and no Infinity): {reason}"
    return f"the body is not JSON: {reason}"


class AsSent(Struct, frozen=True):
    """A body as it came, and as it reads in UTF-8."""

    body: bytes
    view: bytes


def is_encoded(headers: Mapping[str, str]) -> bool:
    """Return whether a body is compressed; `headers` are found by any spelling."""
    return headers.get("Content-Encoding", "").strip().lower() not in ("", "identity")


def utf8(body: bytes) -> bytes:
    """Return JSON as UTF-8 without a byte order mark: `body` itself, if it is that already.

    vLLM 0.32 reads bodies with `json.loads`, which takes UTF-16 and UTF-32, too, and the mark.

    Raises:
        BadRequest: the bytes are not in the encoding that they seem to be in.
    """
    if body[:1] in _PLAIN_STARTS and 0 not in body[:4]:
        return body
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[3:]
    try:
        return body.decode(encoding).encode()
    except UnicodeError as exc:
        raise BadRequest(f"the body looks like {encoding} and is not; send UTF-8") from exc


_PLAIN_STARTS: Final = frozenset(bytes([byte]) for byte in range(1, 128))


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
            BadRequest: a part has this name, or the form is unusual (see router.api.body).
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
