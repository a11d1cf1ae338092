"""Bytes that are nearly right: what a broken process, wire or disk makes of sane ones."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from tests.fuzz.samples import DEPTH

HUGE: Final = (2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63), 0)

numbers = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.sampled_from(HUGE), st.floats(), st.booleans()
)
texts = st.one_of(st.text(max_size=20), st.sampled_from(["", "\0", "NaN", "tcp://*:1", "²", "0x1"]))
leaves = st.one_of(st.none(), numbers, texts, st.binary(max_size=40))


def deep(depth: int) -> Any:
    """Nest lists."""
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    return nested


values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def twisted(draw: st.DrawFn, sane: st.SearchStrategy[Any]) -> Any:
    """Put something else somewhere into a sane tree of dicts and lists."""
    tree = msgspec.to_builtins(draw(sane), builtin_types=(bytes,))
    for _ in range(draw(st.integers(0, 3))):
        tree = _twist(draw, tree)
    return tree


def _twist(draw: st.DrawFn, tree: Any) -> Any:
    if isinstance(tree, dict) and tree:
        key = draw(st.sampled_from(sorted(tree, key=repr)))
        what = draw(st.sampled_from(["change", "drop", "add", "replace"]))
        rest = {name: value for name, value in tree.items() if name != key}
        if what == "drop":
            return rest
        if what == "add":
            return tree | {draw(st.text(max_size=8)): draw(values)}
        return rest | {key: draw(values) if what == "replace" else _twist(draw, tree[key])}
    if isinstance(tree, list | tuple) and tree:
        at = draw(st.integers(0, len(tree) - 1))
        items = list(tree)
        what = draw(st.sampled_from(["change", "drop", "double", "replace"]))
        if what == "drop":
            del items[at]
        elif what == "double":
            items.insert(at, items[at])
        else:
            items[at] = draw(values) if what == "replace" else _twist(draw, items[at])
        return items
    return draw(values)


@st.composite
def mangled(draw: st.DrawFn, sane: st.SearchStrategy[bytes]) -> bytes:
    """Cut, flip, double and insert bytes."""
    data = bytearray(draw(sane))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "drop", "insert", "double"])):
            case "flip" if data:
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 8))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=12))
            case _:
                data[at:at] = data[at : at + draw(st.integers(1, 32))]
    return bytes(data)


@st.composite
def packed(draw: st.DrawFn, sane: st.SearchStrategy[Any]) -> bytes:
    """Write a sane value as msgpack, twisted, mangled, or nested without end."""
    data = msgspec.msgpack.encode(draw(twisted(sane)))
    match draw(st.integers(0, 9)):
        case 0:
            return data[:-1] + b"\x91" * DEPTH + b"\xc0"
        case 1:
            return draw(st.binary(max_size=60))
        case 2 | 3 | 4:
            return draw(mangled(st.just(data)))
    return data


@st.composite
def json_bytes(draw: st.DrawFn, sane: st.SearchStrategy[Any]) -> bytes:
    """Write a sane value as JSON, likewise."""
    tree = draw(twisted(sane))
    data = msgspec.json.encode(tree)
    match draw(st.integers(0, 9)):
        case 0:
            return data[:-1] + b"[" * DEPTH
        case 1:
            return draw(st.binary(max_size=60))
        case 2:
            return data.replace(b"1", b"9" * 5_000).replace(b"0", b"1e999")
        case 3 | 4:
            return draw(mangled(st.just(data)))
    return data
