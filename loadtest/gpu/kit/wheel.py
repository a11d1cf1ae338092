"""A wheel without some of its files; its RECORD fits what is left."""

from __future__ import annotations

import csv
import fnmatch
import io
import zipfile
from collections.abc import Iterable
from pathlib import Path


def matching(wheel: Path, patterns: Iterable[str]) -> list[zipfile.ZipInfo]:
    """Return the files of a wheel that match one of the patterns."""
    wanted = list(patterns)
    with zipfile.ZipFile(wheel) as archive:
        return [
            info
            for info in archive.infolist()
            if any(fnmatch.fnmatchcase(info.filename, pattern) for pattern in wanted)
        ]


def strip(wheel: Path, names: Iterable[str], folder: Path) -> Path:
    """Write a wheel of the same name without some files into a folder; return it."""
    left_out = set(names)
    stripped = folder / wheel.name
    partial = stripped.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(partial, "w") as new:
        for info in old.infolist():
            if info.filename in left_out:
                continue
            data = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                data = _record(data, left_out)
            new.writestr(info, data, info.compress_type, 6)
    partial.rename(stripped)
    return stripped


def unpacked_bytes(wheel: Path) -> int:
    """Return how much room a wheel takes when it is installed."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(info.file_size for info in archive.infolist())


def _record(data: bytes, left_out: set[str]) -> bytes:
    rows = csv.reader(io.StringIO(data.decode()))
    kept = io.StringIO()
    csv.writer(kept, lineterminator="\n").writerows(row for row in rows if row[0] not in left_out)
    return kept.getvalue().encode()
