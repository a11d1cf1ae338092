"""Finds all values of a tree that its types refuse, and says so with their keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from policies.refusals import UNKNOWN, in_words
from router.base.errors import ConfigError
from router.config.removed import REMOVED


def refused(tree: Any, kind: type[Struct]) -> list[ConfigError]:
    """List every value that `kind` refuses, in the order of the tree; []: it can be converted."""
    try:
        msgspec.convert(tree, kind, strict=False, dec_hook=file_name)
    except msgspec.ValidationError as exc:
        return [*_refused(tree, kind, "")] or [explained(str(exc), kind)]
    return []


def explained(message: str, root: type[Struct], value: Any = UNKNOWN) -> ConfigError:
    """Turn msgspec's message into one that names the key and what is allowed there."""
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".").replace("[...]", "[]")
    unknown = re.search(r"unknown field `([^`]*)`", text)
    choices: tuple[str, ...] = ()
    section: Any = root
    for step in re.findall(r"[a-z_]+", path):
        hint = _hints(section).get(step)
        if hint is None:  # a key of a mapping
            break
        section = next((a for a in get_args(hint) if isinstance(a, type)), hint)
        choices = _choices(hint)
    if unknown is not None:
        return _unknown(f"{path}.{unknown[1]}" if path else unknown[1], unknown[1], section)
    return _wrong(path, text, value, choices)


def file_name(kind: type, value: Any) -> Any:
    """Decode what msgspec does not know: file names. What is wrong it reports with its place."""
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("must be a file name")


def _refused(node: Any, hint: Any, path: str) -> Iterator[ConfigError]:
    """Walk down as the types do; what has no parts is converted, to see what msgspec says."""
    bare = _bare(hint)
    before = f"{path}." if path else ""
    found = False
    for key, part, inner in _parts(node, bare):
        where = f"{path}{key}" if key.startswith("[") else before + key
        wrong = [_unknown(where, key, bare)] if inner is None else _refused(part, inner, where)
        for each in wrong:
            found = True
            yield each
    if found:
        return
    try:
        msgspec.convert(node, hint, strict=False, dec_hook=file_name)
    except msgspec.ValidationError as exc:
        text, _, inside = str(exc).partition(" - at `$")
        missing = re.search(r"missing required field `([^`]*)`", text)
        if missing is not None:
            path = before + missing[1]
            yield ConfigError(f"{path}: is missing", param=path)
        else:
            value = UNKNOWN if inside else node
            yield _wrong(path + inside.rstrip("`"), text, value, _choices(hint))


def _parts(node: Any, hint: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of a node: key, node and type; None: the type has no such key."""
    if isinstance(node, dict) and isinstance(hint, type) and issubclass(hint, Struct):
        hints = _hints(hint)
        yield from ((str(key), part, hints.get(key)) for key, part in node.items())
    elif isinstance(node, dict) and get_origin(hint) is dict:
        yield from ((str(key), part, get_args(hint)[1]) for key, part in node.items())
    elif isinstance(node, list) and get_origin(hint) is tuple:
        yield from ((f"[{i}]", part, get_args(hint)[0]) for i, part in enumerate(node))


def _hints(section: type[Struct]) -> dict[str, Any]:
    """Return the types of a section's keys, by the names that files have."""
    hints = get_type_hints(section, include_extras=True)
    fields = msgspec.structs.fields(section) if hasattr(section, "__struct_fields__") else ()
    return {field.encode_name: hints[field.name] for field in fields}


def _bare(hint: Any) -> Any:
    """Return a type without its ranges and without None."""
    while get_origin(hint) in (Annotated, Union, UnionType):
        rest = [each for each in get_args(hint) if each not in (type(None), msgspec.UnsetType)]
        if get_origin(hint) is not Annotated and len(rest) > 1:
            return hint
        hint = rest[0]
    return hint


def _choices(hint: Any) -> tuple[str, ...]:
    """List the words that a type allows."""
    inner = [hint, *get_args(hint)]
    inner += [each for part in inner for each in get_args(part)]
    return tuple(
        dict.fromkeys(word for part in inner for word in get_args(part) if isinstance(word, str))
    )


def _wrong(path: str, text: str, value: Any, choices: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"{path or 'configuration'}: {in_words(text, value, choices)}", param=path or None
    )


def _unknown(key: str, name: str, section: type[Struct]) -> ConfigError:
    removed = REMOVED.get(re.sub(r"\[\d+\]", "[]", key))
    if removed is not None:
        return ConfigError(f"{key} was removed: {removed}", param=key)
    allowed = [field.encode_name for field in msgspec.structs.fields(section)]
    near = difflib.get_close_matches(name, allowed, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown key {key!r}: {meant}Allowed: {', '.join(allowed)}", param=key)
