"""The GPU study without engines: sizes, refusals, and what the page says."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.dev.gpu.__main__ import main
from loadtest.dev.gpu.run_machine import (
    Engines,
    Gpu,
    Hardware,
    NotPossible,
    check_memory,
    check_offload,
    last_line,
)
from loadtest.dev.gpu.run_models import SHAPES, cache_bytes, model_folder, weight_bytes
from loadtest.dev.gpu.run_page import common, make_page, markdown, router_share
from loadtest.dev.gpu.run_record import Fetch, Found, HandOver, Prefill
from loadtest.dev.gpu.run_replicas import GpuReplica, ReplicaDied, while_alive
from loadtest.dev.gpu.run_setting import LongCell, Setting
from loadtest.dev.studies.grid_run import GridRun
from loadtest.machine import this_machine
from loadtest.pages import render
from loadtest.results import Predicted, TurnResult

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


def test_models_have_the_published_sizes() -> None:
    """Parameters without embeddings, by the model cards: 1.4, 3.6 and 6.95 billion."""
    published = {"qwen3-1.7b": 1.4e9, "qwen3-4b": 3.6e9, "qwen3-8b": 6.95e9}
    for name, num_parameters in published.items():
        assert weight_bytes(name) / 2 == pytest.approx(num_parameters, rel=0.03), name

    assert cache_bytes("qwen3-8b", 1_000) == 147_456_000


def test_a_model_is_written_with_its_shape_and_the_tiny_tokenizer(tmp_path: Path) -> None:
    """The folder is all that vLLM and the router read."""
    folder = model_folder("qwen3-4b", tmp_path)

    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == SHAPES["qwen3-4b"].num_layers
    assert config["vocab_size"] == 8_192
    assert (folder / "tokenizer.json").exists()
    assert (folder / "chat_template.jinja").exists()


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


def test_replicas_that_share_a_gpu_are_counted_together() -> None:
    """One 4B replica of 160,000 tokens fits on each of two, two of them on one H100; three not."""
    check_memory((H100, H100), "qwen3-4b", 160_000, 2)
    check_memory((H100,), "qwen3-4b", 160_000, 2)
    with pytest.raises(NotPossible, match="3 x"):
        check_memory((H100,), "qwen3-4b", 160_000, 3)


def test_the_reason_in_a_log_is_its_last_error() -> None:
    """Lines after it tell how processes end."""
    log = (
        "start\ntorch.OutOfMemoryError: CUDA out of memory\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
        "process group destroyed\n\n"
    )

    assert last_line(log) == "torch.OutOfMemoryError: CUDA out of memory"
    assert last_line("") == "it said nothing"


class Ending(GpuReplica):
    """A replica that says why, and ends."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__("r2", log_dir, python=Path(sys.executable))
        self._command = [sys.executable, "-c", "raise SystemExit('CudaError: the GPU is lost')"]


async def test_work_ends_as_soon_as_a_replica_has_ended(tmp_path: Path) -> None:
    """It is not waited for, and the error has the replica's last words."""
    replica = Ending(tmp_path).start()
    try:
        with pytest.raises(ReplicaDied, match="r2 ended: CudaError: the GPU is lost"):
            await while_alive([replica], asyncio.sleep(600))
    finally:
        replica.kill()


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


def test_a_study_with_a_cpu_tier_shows_what_a_read_saves() -> None:
    """The section is there if a tier was asked for, also if it was not measured."""
    fetch = Fetch(
        num_tokens=25_000, num_fetched_tokens=(24_992,), computed_ms=(900.0,), fetched_ms=(90.0,)
    )
    done = found(fetches=(fetch,))
    setting = replace(done.setting, offload_gib=16.0)

    text = markdown(make_page(replace(done, setting=setting)))
    assert "| 25,000 | 24,992 | 900 (900 to 900) | 90 (90 to 90) | 10% |" in text
    assert "CPU offload" in markdown(make_page(replace(found(), setting=setting)))
    assert "CPU offload" not in markdown(make_page(found()))


def test_a_cpu_tier_needs_a_gpu_and_its_memory() -> None:
    """More than what is free is refused before vLLM tries."""
    check_offload(0.0, 2, is_gpu=False)
    with pytest.raises(NotPossible, match="from a GPU only"):
        check_offload(1.0, 2, is_gpu=False)
    with pytest.raises(NotPossible, match="GiB of free memory"):
        check_offload(1e6, 2, is_gpu=True)


def test_the_router_counts_by_its_time_before_dispatch() -> None:
    """Turns of routers that do not say how long they took are left out."""
    timed = TurnResult(
        session_id="s0", number=0, start_s=0.0, total_s=1.0, ttft_s=0.5, router_ms=5.0,
        predicted=Predicted(),
    )  # fmt: skip
    turns = timed, replace(timed, router_ms=None)

    assert router_share([run("kv_aware", 101, 0.5, 1, *turns)]) == pytest.approx(0.01)
    assert router_share([run("kv_aware", 101, 0.5, 1)]) is None


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
