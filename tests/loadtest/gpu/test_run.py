"""The GPU study without engines: sizes, refusals, and what the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.dev.gpu.__main__ import main
from loadtest.dev.gpu.run_machine import (
    Engines,
    Gpu,
    Hardware,
)
from loadtest.dev.gpu.run_page import common, make_page, markdown
from loadtest.dev.gpu.run_record import Found, HandOver, Prefill
from loadtest.dev.gpu.run_setting import LongCell, Setting
from loadtest.dev.studies.grid_run import GridRun
from loadtest.machine import this_machine
from loadtest.pages import render
from loadtest.results import TurnResult

GIB = 1 << 30
H100 = Gpu(name="NVIDIA H100 80GB HBM3", total_bytes=79 * GIB, free_bytes=78 * GIB)
CELL = LongCell(working_set=1.7, num_context_tokens=50_000, think_s=2.0)
WORKING = {"torch": "2.11.0", "vllm": "0.26.0"}


def interpreter(folder: Path, found: dict[str, Any]) -> Path:
    """Write what answers as an engines' interpreter does that has this."""
    made = folder / "python"
    made.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(found)}\nEND\n")
    made.chmod(0o755)
    return made


def run(arm: str, seed: int, ttft_s: float, num_tokens: int, *turns: TurnResult) -> GridRun:
    return GridRun(
        kind="real", cell=CELL, arm=arm, seed=seed, working_set=1.71, num_turns=10, num_errors=0,
        num_prompt_tokens=2_000_000, num_computed_tokens=num_tokens, num_ideal_tokens=500_000,
        ttft_mean_s=ttft_s, ttft_p50_s=ttft_s, ttft_p90_s=2 * ttft_s, num_predicted=10,
        num_exact=9, num_moved=1, span_s=60.0, turns=turns,
    )  # fmt: skip


def found(*runs: GridRun, **fields: Any) -> Found:
    hardware = Hardware(
        processor="Xeon", num_cpus=16, memory_gib=128.0, nvidia_smi=("NVIDIA H100, 81559 MiB",),
        engines=Engines(versions=WORKING, gpus=(H100,), cuda="13.0", has_cuda_code=True),
    )  # fmt: skip
    return Found(
        date="2026-11-28",
        command="python -m loadtest.dev.gpu run",
        machine=this_machine(),
        hardware=hardware,
        setting=Setting(),
        runs=runs,
        **fields,
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"versions": {"torch": "2.11.0"}, "gpus": []}, "has no vLLM"),
        ({"versions": WORKING, "gpus": []}, "no GPU: torch 2.11.0 is built without CUDA"),
        ({"versions": WORKING, "gpus": [], "cuda": "13.0"}, "no GPU: torch 2.11.0 (CUDA 13.0)"),
        (
            {
                "versions": WORKING,
                "gpus": [msgspec.structs.asdict(H100)],
                "cuda": "13.0",
                "has_cuda_code": True,
                "cuda_error": "_C.abi3.so: undefined symbol: aoti_torch",
            },
            "vLLM 0.26.0 is not built for torch 2.11.0 (CUDA 13.0): _C.abi3.so: undefined symbol",
        ),
        (
            {
                "versions": WORKING,
                "gpus": [{"name": "L4", "total_bytes": 23 * GIB, "free_bytes": 22 * GIB}],
                "cuda": "13.0",
                "has_cuda_code": True,
            },
            "GPU 0 (L4): 22.0 GiB are free, 2 x",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    answer: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing starts, and nothing is written."""
    python = interpreter(tmp_path, answer)
    out = tmp_path / "out"

    assert main(["run", "--python", str(python), "--out", str(out)]) == 1

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cache-tokens", "3000"], "has to fit"),
        (["--arms", "kv_awre"], "kv_aware"),
        (["--minutes", "0"], "must be above 0"),
        (["--replicas", "1"], "at least 2"),
        (["--rehearse", "--model", "qwen3-8b"], "tiny model"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option or the nearest variant."""
    with pytest.raises(SystemExit, match="2"):
        main(["run", *words])

    assert said in capsys.readouterr().err


def test_variants_are_compared_over_the_seeds_that_all_have() -> None:
    """A round that was cut off counts for none."""
    runs = [
        run("session_hash", 101, 1.0, 1_000_000),
        run("kv_aware", 101, 0.5, 600_000),
        run("kv_aware", 102, 9.0, 9_000_000),
    ]

    assert [one.seed for one in common(runs)[CELL]] == [101, 101]
    page = make_page(found(*runs))
    assert "40% fewer tokens than session_hash" in page.lead
    assert "time to first token is 50% shorter" in page.lead


def test_the_page_has_what_was_measured_and_names_what_was_not() -> None:
    """Both forms: an early end is a note, and what came before it is there."""
    done = found(
        run("session_hash", 101, 1.0, 1_000_000),
        run("kv_aware", 101, 0.5, 600_000),
        prefills=(Prefill(num_tokens=25_000, measured_ms=(800.0,), predicted_ms=(720.0,)),),
        hand_overs=(HandOver(num_tokens=80_000, off_ms=(400.0,), on_ms=(150.0,), num_handed=1),),
        notes=("r2 ended: CudaError: the GPU is lost (during seed 102)",),
    )
    page = make_page(done)

    text = markdown(page)
    assert text.startswith("# Routing on 1 x NVIDIA H100 80GB HBM3\n")
    assert "| kv_aware | 0.500 | 0.500 | 1.000 | -50% | 600,000 | 100,000 | -40% | 90.0% |" in text
    assert "| 25,000 | 800 (800 to 800) | 720 (720 to 720) | 0.90 |" in text
    assert "| 80,000 | 400 (400 to 400) | 150 (150 to 150) | 250 | 1 of 1 |" in text
    assert "the GPU is lost" in text
    assert "the GPU is lost" in render(page)
    nothing = markdown(make_page(found()))
    assert nothing.count("no run is done.") == 3
    assert nothing.count("Not measured") == 2
