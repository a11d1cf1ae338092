"""Which formats there are, and which one a file has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.traces.bailian import Bailian
from loadtest.traces.blocks import Blocks, load_tokenizer
from loadtest.traces.errors import NOT_JSON, WorkloadError
from loadtest.traces.messages import Messages
from loadtest.traces.mooncake import BLOCK_TOKENS, Mooncake
from loadtest.traces.records import Records
from loadtest.traces.request import LineReader
from loadtest.traces.sharegpt import ShareGpt

_BOM: Final = b"\xef\xbb\xbf"
_NUM_PROBED: Final = 10  # lines that may be bad before the format is known


Maker = Callable[[int | None, Path | None], LineReader]


def _with_tokenizer(make: Callable[[Blocks], LineReader]) -> Maker:
    return lambda block_size, tokenizer: make(
        Blocks(load_tokenizer(tokenizer), block_size or BLOCK_TOKENS)
    )


FORMATS: Final[dict[str, Maker]] = {
    "mooncake": lambda block_size, _: Mooncake(block_size),
    "bailian": lambda block_size, _: Bailian(block_size),
    "records": lambda block_size, _: Records(block_size),
    "sharegpt": _with_tokenizer(ShareGpt),
    "messages": _with_tokenizer(Messages),
}
"""Name to maker: of block size (None: the format's own) and tokenizer (None: the bundled one)."""

_MARKS: Final = {
    "conversations": "sharegpt",
    "messages": "messages",
    "input": "messages",
    "chat_id": "bailian",
    "num_prompt_tokens": "records",
    "input_length": "mooncake",
    "hash_ids": "mooncake",
}
"""Field to the format that has it; the first one found decides."""


def format_of(path: Path) -> str:
    """Detect a file's format from its first lines.

    Raises:
        WorkloadError: It is empty, or they are of no format.
        OSError: It cannot be read.
    """
    seen = 0
    for _, raw in entries(path):
        seen += 1
        try:
            fields = msgspec.json.decode(raw, type=dict[str, Any])
        except NOT_JSON:
            fields = {}
        for mark, name in _MARKS.items():
            if mark in fields:
                return name
        if seen == _NUM_PROBED:
            break
    if not seen:
        raise WorkloadError(f"{path}: the file is empty")
    marks = ", ".join(f"{mark} ({name})" for mark, name in _MARKS.items())
    raise WorkloadError(
        f"{path}: line 1: the format is unknown; allowed: JSON objects with one of {marks}, or "
        "name it with --format"
    )


def entries(
    path: Path, advance: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[int, bytes]]:
    """Read a file's lines, or the entries of a file that is one JSON array; blank lines are none.

    Yields:
        Number, from 1, and bytes; `advance` is called with the bytes that were read for it.

    Raises:
        WorkloadError: A JSON array is malformed.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(64).removeprefix(_BOM).lstrip()
        file.seek(0)
        if start.startswith(b"["):
            yield from _array(path, file.read(), advance)
            return
        for number, line in enumerate(file, 1):
            advance(len(line))
            stripped = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if stripped:
                yield number, stripped


def _array(
    path: Path, content: bytes, advance: Callable[[int], None]
) -> Iterator[tuple[int, bytes]]:
    try:
        parts = msgspec.json.decode(content.removeprefix(_BOM), type=list[msgspec.Raw])
    except NOT_JSON as error:
        raise WorkloadError(f"{path}: not a JSON array: {error}") from error
    for number, part in enumerate(parts, 1):
        raw = bytes(part)
        advance(len(raw))
        yield number, raw
