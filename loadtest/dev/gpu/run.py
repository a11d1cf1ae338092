"""Measure routing on this machine's GPUs, or rehearse it on the CPU.

    python -m loadtest.dev.gpu run --minutes 12 --out build/gpu
    python -m loadtest.dev.gpu run --rehearse            two small CPU engines, 5 minutes

It starts vLLM replicas with random weights, one a GPU, or two that share one. Agent sessions whose
contexts grow long run under one variant after the other, with the same sessions in every round.
What is done is in OUT/gpu.json after every step; the pages are OUT/gpu.html and OUT/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Final

import httpx
import msgspec
from msgspec.structs import replace
from rich.console import Console

from loadtest.compare.arms import arm_of
from loadtest.dev.gpu.run_machine import NotPossible, check_gpus, check_memory, check_offload, look
from loadtest.dev.gpu.run_models import MODELS, TINY
from loadtest.dev.gpu.run_page import make_page, markdown
from loadtest.dev.gpu.run_record import Found
from loadtest.dev.gpu.run_replicas import ReplicaDied, make_replicas
from loadtest.dev.gpu.run_setting import Setting
from loadtest.dev.gpu.run_study import Study
from loadtest.dev.studies.measured import interrupt_on_sigterm
from loadtest.engines.vllm import engine_python
from loadtest.machine import this_machine
from loadtest.pages import render
from loadtest.runner.children import ChildDied

REHEARSAL: Final = Setting(
    device="cpu",
    model=TINY,
    num_context_tokens=4_000,
    num_cache_tokens=20_000,
    working_sets=(1.7,),
    think_s=0.5,
    minutes=5.0,
    num_rounds=1,
    prefill_lengths=(1_000, 4_000),
    hand_over_lengths=(2_000, 8_000),
)
"""Sizes for the tiny model on two cores."""


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.dev.gpu run", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument(
        "--rehearse", action="store_true", help="two small engines on the CPU, for some minutes"
    )
    made.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the results")
    made.add_argument("--minutes", type=float, help="end within this time; default 12")
    made.add_argument("--rounds", type=int, help="at most so many; default: what the time allows")
    made.add_argument(
        "--python", type=Path, help="interpreter that can import vllm; default: this one if it can"
    )
    made.add_argument("--model", choices=MODELS, help="shape of the model, with random weights")
    made.add_argument("--replicas", type=int, help="default: one a GPU, at least 2")
    made.add_argument("--context", type=int, help="tokens at a session's end, in the median")
    made.add_argument("--cache-tokens", type=int, help="size of each replica's KV cache")
    made.add_argument(
        "--working-set", nargs="+", type=float, metavar="TIMES", help="over all caches, 0.6 to 3"
    )
    made.add_argument("--think", type=float, help="median seconds between a session's turns")
    made.add_argument("--arms", nargs="+", metavar="POLICY[:PARAM=VALUE,…]", help="the variants")
    made.add_argument(
        "--prefill", nargs="*", type=int, metavar="TOKENS", help="prompts for the cost model"
    )
    made.add_argument(
        "--hand-over", nargs="*", type=int, metavar="TOKENS", help="prompts for token hand-over"
    )
    made.add_argument("--repeats", type=int, help="of each of these prompts")
    made.add_argument(
        "--offload-gib", type=float, help="vLLM's CPU offload, size of each replica's tier"
    )
    return made


def setting_of(args: argparse.Namespace) -> Setting:
    """Take what is asked for over the defaults.

    Raises:
        ValueError: a number or a variant makes no sense.
    """
    given = {
        "minutes": args.minutes,
        "num_rounds": args.rounds,
        "model": args.model,
        "num_replicas": args.replicas,
        "num_context_tokens": args.context,
        "num_cache_tokens": args.cache_tokens,
        "working_sets": args.working_set,
        "think_s": args.think,
        "arms": args.arms,
        "prefill_lengths": args.prefill,
        "hand_over_lengths": args.hand_over,
        "num_repeats": args.repeats,
        "offload_gib": args.offload_gib,
    }
    chosen: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in given.items()
        if value is not None
    }
    setting = replace(REHEARSAL if args.rehearse else Setting(), **chosen)
    if setting.device == "cpu" and setting.model != TINY:
        raise ValueError(f"--model {setting.model}: the rehearsal has the tiny model")
    for label in setting.arms:
        arm_of(label)
    setting.check()
    return setting


def main(argv: Sequence[str]) -> int:
    """Measure; write the file after every step, and the pages at the end."""
    asked = parser()
    args = asked.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    try:
        setting = setting_of(args)
    except ValueError as exc:
        asked.error(str(exc))
    started_s = monotonic()
    try:
        python = args.python.absolute() if args.python else _python()
        found = _begin(setting, python, argv, asks_replicas=args.replicas is not None)
    except (NotPossible, FileNotFoundError) as exc:
        console.print(str(exc), style="red", markup=False, soft_wrap=True)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)

    def keep(**more: tuple[Any, ...]) -> None:
        nonlocal found
        added = {name: (*getattr(found, name), *values) for name, values in more.items()}
        found = replace(found, **added, took_s=round(monotonic() - started_s, 1))
        (args.out / "gpu.json").write_bytes(msgspec.json.encode(found) + b"\n")

    keep()
    interrupt_on_sigterm()
    code = 0
    log_dir = Path(tempfile.mkdtemp(prefix="logs-", dir=args.out)).absolute()
    study = Study(
        found.setting,
        make_replicas(found.setting, python, log_dir, found.hardware.engines.gpus),
        log_dir,
        keep,
        lambda text: console.print(
            f"{monotonic() - started_s:5.0f} s  {text}", markup=False, soft_wrap=True
        ),
    )
    try:
        study.run()
    except KeyboardInterrupt:
        keep(notes=("stopped by hand",))
        code = 130
    except (ReplicaDied, ChildDied, httpx.HTTPError, OSError) as exc:
        keep(notes=(" ".join(str(exc).split())[:500],))
        console.print(found.notes[-1], style="red", markup=False, soft_wrap=True)
        code = 1
    page = make_page(found)
    (args.out / "gpu.html").write_text(render(page))
    (args.out / "gpu.md").write_text(markdown(page))
    console.print(f"wrote {args.out}/gpu.json, gpu.html and gpu.md", markup=False)
    return code


def _begin(setting: Setting, python: Path, argv: Sequence[str], *, asks_replicas: bool) -> Found:
    """Check that the machine can do it, and describe both.

    Raises:
        NotPossible: it cannot.
    """
    hardware = look(python)
    gpus = hardware.engines.gpus
    if setting.device == "gpu":
        check_gpus(hardware.engines)
        if not asks_replicas:
            setting = replace(setting, num_replicas=max(2, len(gpus)))
        check_memory(gpus, setting.model, setting.num_cache_tokens, setting.num_replicas)
    check_offload(setting.offload_gib, setting.num_replicas, is_gpu=setting.device == "gpu")
    return Found(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["python", "-m", "loadtest.dev.gpu", "run", *argv]),
        machine=this_machine(),
        hardware=hardware,
        setting=setting,
    )


def _python() -> Path:
    """Choose this interpreter if it has a vLLM, else the engines' one."""
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    return engine_python()
