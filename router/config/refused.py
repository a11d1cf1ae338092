"""Finds all values of a tree that its types refuse, with their keys; and keys that were removed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from policies.refusals import UNKNOWN, in_words, meant
from router.base.errors import ConfigError

_TODAY: Final = {
    "discovery.empty_s": "60",
    "events.replay_timeout_s": "5",
    "forward.overdue_floor_s": "10",
    "forward.overdue_ratio": "3",
    "forward.retry_backoff_s": "0.05",
    "limits.header_bytes": "16,384",
    "limits.header_timeout_s": "15",
    "mooncake.poll_s": "1",
    "mooncake.timeout_s": "5",
    "mooncake.verify_keys": "512",
    "policy.first_blocks_tokens": "2,048",
    "session.max_sessions": "100,000",
    "tokens.inline_chars": "32,768",
}
"""Keys that had no use, and the value that each has now."""

REMOVED: Final[Mapping[str, str]] = {
    "discovery.file": "write the replicas into the configuration file, set "
    "discovery.follow_config, and remove the key",
    "experiment.definitions": "there is one experiment; write its keys below `experiment`",
    "experiment.control": "the first variant is the control; remove the key",
    "experiment.holdout": "give variants shares that sum to less than 1; remove the key",
    "experiment.ramp": "change the variants' shares in the file, and send SIGHUP; remove the key",
    "experiment.guardrails": "use the alert VariantWorse; remove the key",
    "experiment.seed": "another name draws other variants; remove the key",
    "experiment.variants[].params": "write them into the policy: `kv_aware:alpha=0`",
    "experiment.variants[].queue": "write it into the policy: `kv_aware:queue.mode=off`",
    "listen.workers": "start several routers with --share-port, a port and a Redis in common, an "
    "--admin-port each (docs/operate/all-cores.md); remove the key",
    "shadow": "ask other policies later, with `warmroute redecide`; remove the section",
    "tenants[].requests_per_minute": "limit rates in the gateway in front; remove the key",
    "tenants[].uncached_tokens_per_minute": "limit rates in the gateway in front; remove the key",
    "limits.websockets": "route WebSockets to a replica; remove the key",
    "limits.websocket_idle_s": "route WebSockets to a replica; remove the key",
    "listen.allowed_origins": "restrict web pages in the proxy in front, and remove the key",
    "limits.connections_per_address": "limit connections in the proxy in front; remove the key",
    "early.min_tokens": "it is 512 tokens; use early.mode off, or remove the key",
    **{key: f"it is {value}; remove the key" for key, value in _TODAY.items()},
}


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
    hint = f"{meant(name, allowed)} (allowed: {', '.join(allowed)})"
    return ConfigError(f"unknown key {key!r}{hint}", param=key)
