"""Read a trace file into a workload, naming what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from loadtest.timing import Timing
from loadtest.traces.blocks import Blocks, load_tokenizer
from loadtest.traces.building import build
from loadtest.traces.errors import NOT_JSON, BadLine, WorkloadError
from loadtest.traces.messages import Messages
from loadtest.traces.mooncake import BLOCK_TOKENS, Mooncake
from loadtest.traces.records import Records
from loadtest.traces.request import LineReader
from loadtest.workload import Workload

_BOM: Final = b"\xef\xbb\xbf"
_NUM_PROBED: Final = 10  # lines that may be bad before the format is known
_MARKS: Final = {
    "messages": "messages",
    "input": "messages",
    "num_prompt_tokens": "decision records",
    "input_length": "mooncake",
    "hash_ids": "mooncake",
}
"""Field to the format that has it; the first one found decides."""


def read_workload(
    path: Path,
    *,
    skip_bad: bool = False,
    max_requests: int | None = None,
    block_size: int | None = None,
    tokenizer: Path | None = None,
    timing: Timing = Timing(),  # noqa: B008 - it is frozen
) -> Workload:
    """Read a trace; its format is detected from its first lines.

    Args:
        path: The file, JSON Lines.
        skip_bad: Leave bad lines out and count them, instead of ending at the first one.
        max_requests: Only so many, from the beginning of the file.
        block_size: Tokens of a block; None: the format's own.
        tokenizer: A tokenizer.json or its directory, for text; None: the bundled model's.
        timing: What to make of the times.

    Raises:
        WorkloadError: The file, a line or a field is wrong; the message says which and what is
            allowed there.
    """
    try:
        reader = _reader_of(path, block_size, tokenizer)
        num_skipped = _read(path, reader, skip_bad, max_requests)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    return build(
        reader.drafts()[:max_requests],
        name=path.name,
        block_size=reader.block_size,
        timing=timing,
        num_skipped=num_skipped,
    )


def _reader_of(path: Path, block_size: int | None, tokenizer: Path | None) -> LineReader:
    """Make the reader of a file's format.

    Raises:
        WorkloadError: The file is empty, its format is unknown, or there is no such tokenizer.
        OSError: The file cannot be read.
    """
    match _format_of(path):
        case "mooncake":
            return Mooncake(block_size)
        case "messages":
            return Messages(Blocks(load_tokenizer(tokenizer), block_size or BLOCK_TOKENS))
        case _:
            return Records(block_size)


def _format_of(path: Path) -> str:
    seen = 0
    for _, raw in _lines(path):
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
        f"{path}: line 1: the format is unknown; allowed: JSON objects with one of {marks}"
    )


def _read(path: Path, reader: LineReader, skip_bad: bool, max_requests: int | None) -> int:
    """Hand the lines of a file to its reader; return the number of bad lines left out."""
    num_skipped = 0
    first_bad = ""
    for number, raw in _lines(path):
        if max_requests is not None and reader.num_requests >= max_requests:
            break
        try:
            reader.add(raw)
        except BadLine as bad:
            problem = f"{path}: line {number}: {bad}"
            if not skip_bad:
                raise WorkloadError(problem) from bad
            num_skipped += 1
            first_bad = first_bad or problem
    if not reader.num_requests:
        bad_ones = f", {num_skipped:,} bad lines, the first: {first_bad}" if num_skipped else ""
        raise WorkloadError(f"{path}: no requests{bad_ones}")
    return num_skipped


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read a file's lines with their numbers, from 1; blank ones are left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            stripped = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if stripped:
                yield number, stripped
