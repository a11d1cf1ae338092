"""YAML as all our files have it: bounded, safe tags alone, a key once; errors name the line.

Errors quote nothing of the file: it may hold secrets.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from router.base.errors import ConfigError

MAX_BYTES: Final = 4 * 1024 * 1024
_MERGE: Final = "tag:yaml.org,2002:merge"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that is given twice: YAML would quietly take the last."""


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise _wrong("a key must be text", key_node)
        if key in seen:
            raise _wrong("a key is given twice", key_node)
        seen.add(key)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read(path: Path) -> bytes:
    """Read a file's content.

    Raises:
        ConfigError: it cannot be read; the message has the reason alone.
    """
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as exc:
        raise ConfigError(exc.strerror or type(exc).__name__) from exc


def parse(data: bytes) -> Any:
    """Read a document; None: there is nothing in it.

    Raises:
        ConfigError: it is too large, or no YAML; the message names the line.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes")
    try:
        return yaml.load(data.decode(), _Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        last = data.rstrip().count(b"\n")  # the end of the file is a line of its own
        where = f"line {min(mark.line, last) + 1}: " if mark is not None else ""
        lines = data.split(b"\n")
        if mark is not None and mark.line < len(lines) and lines[mark.line].startswith(b"\t"):
            raise ConfigError(f"{where}begins with a tab; YAML takes spaces only") from None
        raise ConfigError(f"{where}not YAML: {_unquoted(exc.problem or '')}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # no UTF-8, or no such date
        raise ConfigError(f"not YAML ({type(exc).__name__})") from None


def placed(error: ConfigError, file: Path, data: bytes) -> ConfigError:
    """Name the file, and the line of the key that is wrong, before an error's message."""
    line = line_of(data, error.param) if error.param is not None else None
    where = f"{file}:{line}" if line is not None else str(file)
    return ConfigError(f"{where}: {error.message}", param=error.param)


def line_of(data: bytes, key: str) -> int | None:
    """Find the line of a key, e.g. `replicas[0].url`, or of what it would be in; None: neither."""
    try:
        node = yaml.compose(data.decode(), _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    line = None
    for step in re.findall(r"[^.\[\]]+", key):
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == step), None)
        elif isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
            found = (node.value[int(step)],) * 2
        elif isinstance(node, yaml.SequenceNode) and line is None:
            continue  # a list that stands for a mapping with one key
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _wrong(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _unquoted(problem: str) -> str:
    """Return the parser's message without what it quotes of the file: more than a character."""
    return re.sub(r"'([^']*)'", lambda quote: quote[0] if len(quote[1]) == 1 else "…", problem)
