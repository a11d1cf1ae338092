"""Read a trace file into a workload, naming what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loadtest.timing import Timing
from loadtest.traces.building import build
from loadtest.traces.errors import BadLine, WorkloadError
from loadtest.traces.formats import FORMATS, entries, format_of
from loadtest.traces.request import LineReader
from loadtest.workload import Workload


def read_workload(
    path: Path,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    max_requests: int | None = None,
    block_size: int | None = None,
    tokenizer: Path | None = None,
    timing: Timing = Timing(),  # noqa: B008 - it is frozen
    advance: Callable[[int], None] = lambda _: None,
) -> Workload:
    """Read a trace.

    Args:
        path: The file.
        format: A key of `FORMATS`; None: detected from its first lines.
        skip_bad: Leave bad lines out and count them, instead of ending at the first one.
        max_requests: Only so many, from the beginning of the file.
        block_size: Tokens of a block; None: the format's own.
        tokenizer: A tokenizer.json or its directory, for text; None: the bundled model's.
        timing: What to make of the times.
        advance: Called with the number of bytes read, again and again.

    Raises:
        WorkloadError: The file, a line or a field is wrong; the message says which and what is
            allowed there.
    """
    try:
        reader = FORMATS[format or format_of(path)](block_size, tokenizer)
        num_skipped = _read(path, reader, skip_bad, max_requests, advance)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error
    return build(
        reader.drafts()[:max_requests],
        name=path.name,
        block_size=reader.block_size,
        timing=timing,
        num_skipped=num_skipped,
    )


def _read(
    path: Path,
    reader: LineReader,
    skip_bad: bool,
    max_requests: int | None,
    advance: Callable[[int], None],
) -> int:
    """Read a file into a format; return the number of bad lines left out."""
    num_skipped = 0
    first_bad = ""
    for number, raw in entries(path, advance):
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
