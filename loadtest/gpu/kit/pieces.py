"""One stream of wheels, cut into pieces of a given size, and the manifest that describes both.

A wheel may lie across two pieces. The manifest has the hashes of wheels and of pieces, so that
`install.py` can name the piece that is damaged.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadtest.gpu.kit import install
from loadtest.gpu.kit.asked import WITHOUT_FLASHINFER, KitError, Target
from loadtest.gpu.kit.wheel import needed_glibc, unpacked_bytes

MANIFEST: Final = "kit.json"
_CHUNK_BYTES: Final = 1 << 20


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the kit: a wheel in the stream, or a piece of it."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a kit has, and which machine it is for. Read by `install.py` as plain JSON."""

    packages: list[str]
    python: str
    glibc: str
    have: dict[str, str | None]
    dropped: list[str]
    stripped: list[str]
    environment: dict[str, str]
    unpacked_bytes: int
    wheels: list[Part]
    pieces: list[Part]


def write(
    folder: Path,
    wheels: Sequence[Path],
    piece_bytes: int,
    *,
    target: Target,
    packages: Sequence[str],
    dropped: Sequence[str],
    stripped: Sequence[str],
) -> Manifest:
    """Write pieces, manifest and installer into a folder; return the manifest.

    Raises:
        KitError: the disk has too little room for the pieces.
    """
    total = sum(wheel.stat().st_size for wheel in wheels)
    require_room(folder, total)
    for old in folder.glob("piece-*"):
        old.unlink()
    num_pieces = -(-total // piece_bytes)
    parts = [_part(wheel) for wheel in wheels]
    pieces = [
        _write_piece(folder / f"piece-{number:02}-of-{num_pieces:02}", data)
        for number, data in enumerate(_cut(wheels, piece_bytes), start=1)
    ]
    is_vllm = any(wheel.name.startswith("vllm-") for wheel in wheels)
    manifest = Manifest(
        packages=list(packages),
        python=target.python,
        glibc=needed_glibc(wheels),
        have=target.have,
        dropped=list(dropped),
        stripped=list(stripped),
        environment=WITHOUT_FLASHINFER if is_vllm and "flashinfer-python" in dropped else {},
        unpacked_bytes=sum(map(unpacked_bytes, wheels)),
        wheels=parts,
        pieces=pieces,
    )
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (folder / MANIFEST).write_bytes(text + b"\n")
    shutil.copy(install.__file__, folder / "install.py")
    return manifest


def require_room(folder: Path, needed_bytes: int) -> None:
    """Require free room on a folder's disk.

    Raises:
        KitError: there is too little.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        needed, left = needed_bytes >> 20, free >> 20
        raise KitError(f"{folder}: {needed:,} MiB are needed, {left:,} MiB are free")


def _part(file: Path) -> Part:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Part(name=file.name, size_bytes=file.stat().st_size, sha256=digest)


def _cut(wheels: Sequence[Path], piece_bytes: int) -> Iterator[bytes]:
    """Yield the stream of all wheels in pieces; one piece is in memory at a time."""
    piece = bytearray()
    for wheel in wheels:
        with wheel.open("rb") as stream:
            while chunk := stream.read(min(_CHUNK_BYTES, piece_bytes - len(piece))):
                piece += chunk
                if len(piece) == piece_bytes:
                    yield bytes(piece)
                    piece.clear()
    if piece:
        yield bytes(piece)


def _write_piece(file: Path, data: bytes) -> Part:
    file.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return Part(name=file.name, size_bytes=len(data), sha256=digest)
