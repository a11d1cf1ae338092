"""`python -m loadtest.gpu kit`: resolve, download, leave out, cut into pieces.

Exit status: 0 the kit is there; 1 it cannot be made, in one line.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loadtest.gpu.kit import pieces
from loadtest.gpu.kit.asked import (
    DROPPED,
    HAVE,
    STRIPPED,
    VLLM,
    KitError,
    Target,
    default_packages,
    plain,
    read_have,
)
from loadtest.gpu.kit.download import download, is_local, local_wheels
from loadtest.gpu.kit.resolve import find_uv, resolve
from loadtest.gpu.kit.wheel import matching, strip

_MIB: Final = 1 << 20
_ROOM_BYTES: Final = 1 << 30
"""A kit of vLLM: 0.3 GB of wheels, the stripped one, the pieces, and what pip keeps meanwhile."""

_DESCRIPTION: Final = f"""\
Pack vLLM and warmroute for a machine without a package index.

The pieces and install.py go to OUT. On the target: python3.12 OUT/install.py FOLDER
By default the kit has {VLLM} and warmroute, and counts on PyTorch 2.11 there.
It leaves out kernels and packages that a dense bf16 model on an H100 or H200 does not need.
"""


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.gpu kit",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked.add_argument("--out", type=Path, required=True, help="folder for the kit")
    asked.add_argument("--piece-mib", type=int, default=60, help="size of a piece (default: 60)")
    asked.add_argument(
        "--package", action="append", metavar="NAME==RELEASE|FOLDER|WHEEL",
        help="what to pack, instead of vLLM and warmroute; may be repeated",
    )  # fmt: skip
    asked.add_argument(
        "--have", default=str(HAVE), metavar="FILE|torch==2.11.0,…|nothing",
        help="what the target has: its `pip freeze` (default: an image with PyTorch 2.11)",
    )  # fmt: skip
    asked.add_argument("--python", default="3.12", help="Python of the target (default: 3.12)")
    asked.add_argument("--glibc", default="2.39", help="its C library (default: 2.39)")
    asked.add_argument("--whole", action="store_true", help="leave out nothing that vLLM requires")
    asked.add_argument(
        "--wheels", type=Path, metavar="FOLDER",
        help="folder for the downloads, kept for the next kit (default: OUT-wheels)",
    )  # fmt: skip
    return asked


def main(argv: Sequence[str]) -> int:
    """Make a kit; return the exit status."""
    args = parser().parse_args(argv)
    try:
        make(args)
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
    except OSError as error:
        print(f"kit: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("kit: stopped; complete downloads are kept", file=sys.stderr)
    else:
        return 0
    return 1


def make(args: argparse.Namespace) -> None:
    """Make a kit.

    Raises:
        KitError: it cannot be made as asked.
    """
    out: Path = args.out.resolve()
    target = _target(args)
    packages: list[str] = args.package or default_packages()
    dropped = () if args.whole else DROPPED
    wheels = args.wheels or out.with_name(f"{out.name}-wheels")
    wheels /= f"python{target.python}-glibc{target.glibc}"
    find_uv()
    for folder in (out, wheels):
        folder.mkdir(parents=True, exist_ok=True)
    if any(package.startswith("vllm") for package in packages):
        pieces.require_room(out, _ROOM_BYTES)

    local = local_wheels(packages, wheels)
    named = [package for package in packages if not is_local(package)]
    asked = [*named, *map(_title, local)]
    for package in ("pip", *asked):  # are in the kit whether the target has them or not
        target.have.pop(plain(re.split(r"[^\w.-]", package)[0]), None)
    print(f"resolve for Python {target.python}, glibc {target.glibc}", flush=True)
    with tempfile.TemporaryDirectory(prefix="warmroute-kit-") as scratch:
        pins = resolve(["pip", *named, *map(str, local)], target, dropped, Path(scratch))
    found = [*download(pins, target, wheels), *local]
    kept, stripped = _strip(found, () if args.whole else STRIPPED, wheels)
    print(f"write pieces of {args.piece_mib} MiB", flush=True)
    manifest = pieces.write(
        out,
        kept,
        args.piece_mib * _MIB,
        target=target,
        packages=asked,
        dropped=sorted(dropped),
        stripped=stripped,
    )
    _report(out, manifest)


def _target(args: argparse.Namespace) -> Target:
    if args.piece_mib < 1:
        raise KitError(f"--piece-mib {args.piece_mib}: at least 1")
    if re.fullmatch(r"3\.\d+", args.python) is None:
        raise KitError(f"--python {args.python}: a release like 3.12")
    if re.fullmatch(r"2\.\d+", args.glibc) is None:
        raise KitError(f"--glibc {args.glibc}: a release like 2.39")
    return Target(python=args.python, glibc=args.glibc, have=read_have(args.have))


def _strip(
    wheels: Sequence[Path], patterns: Sequence[str], folder: Path
) -> tuple[list[Path], list[str]]:
    """Replace wheels by stripped ones where a pattern matches; list the files left out."""
    kept: list[Path] = []
    left_out: list[str] = []
    stripped = folder / "stripped"
    for wheel in wheels:
        infos = matching(wheel, patterns)
        if not infos:
            kept.append(wheel)
            continue
        size = sum(info.compress_size for info in infos)
        print(f"leave out {len(infos)} files of {wheel.name}: {size / _MIB:,.0f} MiB", flush=True)
        stripped.mkdir(exist_ok=True)
        names = [info.filename for info in infos]
        kept.append(strip(wheel, names, stripped))
        left_out += names
    return kept, left_out


def _title(wheel: Path) -> str:
    name, release, *_ = wheel.name.split("-")
    return f"{plain(name)}=={release}"


def _report(out: Path, manifest: pieces.Manifest) -> None:
    """Print the largest wheels, the pieces, and the command for the target."""
    largest = sorted(manifest.wheels, key=lambda part: part.size_bytes, reverse=True)
    for part in largest[:8]:
        print(f"{part.size_bytes / _MIB:8.1f} MiB  {part.name}")
    rest = largest[8:]
    if rest:
        size = sum(part.size_bytes for part in rest) / _MIB
        print(f"{size:8.1f} MiB  in {len(rest)} other wheels")
    for part in manifest.pieces:
        print(f"{part.size_bytes / _MIB:8.1f} MiB  {out / part.name}")
    print(
        f"{manifest.unpacked_bytes / _MIB:,.0f} MiB when installed. On the target, with all pieces "
        f"in one folder: python{manifest.python} install.py FOLDER"
    )
