"""What a kit is for: its packages, the machine that gets it, and what is left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

VLLM: Final = "vllm==0.26.0"
"""The newest release that pins torch 2.11.0."""

HAVE: Final = Path(__file__).with_name("have.txt")
NOTHING: Final = "nothing"

DROPPED: Final = (
    # Kernels for MoE, MLA, FP4 and FP8, for newer GPUs, or for other models: imported when used.
    "flashinfer-python", "humming-kernels", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl",
    "quack-kernels", "tilelang", "tokenspeed-mla",
    # Audio and video, and another way to load weights.
    "fastsafetensors", "opencv-python-headless", "pynvvideocodec", "torchcodec",
    # Profiling, and the commands of FastAPI.
    "nvtx", "fastapi-cli", "fastapi-cloud-cli",
)  # fmt: skip
"""Packages that vLLM requires, and a dense bf16 model on Hopper does not import.

Source: vLLM 0.26.0, imported without them.
"""

WITHOUT_FLASHINFER: Final = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""What vLLM's sampler has to know: it imports FlashInfer without a try."""

STRIPPED: Final = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",  # FlashAttention 2; Hopper has 3; the import is caught
    "vllm/_moe_C*",  # mixture of experts; suppressed in platforms/interface.py
    "vllm/_flashmla*",  # DeepSeek's attention; caught in v1/attention/ops/flashmla.py
    "vllm/_qutlass_C*",  # FP4; suppressed in platforms/cuda.py
    "vllm/vllm-rs",  # another API server; used if VLLM_USE_RUST_FRONTEND is set
    "vllm/third_party/deep_gemm/*",  # FP8; looked up when used
    "vllm/third_party/fmha_sm100/*",  # Blackwell's attention
)
"""Files of vLLM's wheel that a dense bf16 model on Hopper does not load."""

_PINNED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.!+_-]+))?")


class KitError(Exception):
    """The kit cannot be made as asked; the message is one line for a person."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that gets the kit."""

    python: str
    glibc: str
    have: dict[str, str | None]  # None: the release is not known


def plain(name: str) -> str:
    """Write a package's name as indexes do: lower case, with single hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_have(text: str) -> dict[str, str | None]:
    """Read what the target has: a file of `pip freeze`, or `name==release` between commas.

    Raises:
        KitError: the file cannot be read, or an entry is no such name.
    """
    if text == NOTHING:
        return {}
    if "/" not in text and ("==" in text or "," in text):
        return _entries(text.split(","), "--have")
    try:
        lines = Path(text).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KitError(f"{text}: cannot be read: {error}") from error
    return _entries(lines, text)


def _entries(lines: Iterable[str], source: str) -> dict[str, str | None]:
    """Read entries; comments, options and packages from an address have no release."""
    have: dict[str, str | None] = {}
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].partition(";")[0].strip()
        if not entry or entry.startswith("-"):
            continue
        entry = entry.partition(" @ ")[0]
        if (match := _PINNED.fullmatch(entry)) is None:
            raise KitError(f"{source}, entry {number}: {entry!r} is not NAME or NAME==RELEASE")
        have[plain(match[1])] = match[2]
    return have


def default_packages() -> list[str]:
    """Return vLLM, and warmroute from this checkout if there is one."""
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():
        return [VLLM, str(checkout)]
    return [VLLM, f"warmroute=={metadata.version('warmroute')}"]
