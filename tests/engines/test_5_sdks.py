"""Anthropic's package and `vllm bench serve`, unchanged: nothing but the base URL is set."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.harness import ENVIRON, MODEL_DIR, Engine, Router, engine_python, wait_until

_TIMEOUT_S = 240.0
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command calls, which the CPU build's own script cannot: it wants metadata of `vllm`."""


def run(*words: str | Path) -> str:
    """Run the engines' interpreter, which has both; return what it prints."""
    done = subprocess.run(
        [engine_python(), *words],
        env={**os.environ, **ENVIRON},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3_000:]
    return done.stdout.decode()


def prompts(router: Router) -> list[dict[str, Any]]:
    """Read the records written so far of what engines counted."""
    if not router.decisions_path.exists():
        return []
    return [each for each in router.decisions() if each["num_prompt_tokens"]]


def test_anthropics_package(router: Router, replicas: tuple[Engine, Engine]) -> None:
    """Whole, streamed on the first one's cache, counted; refusals are the package's own errors."""
    before = {
        result: router.metric("warmroute_audited_total", result=result)
        for result in ("over", "under")
    }
    script = Path(__file__).with_name("anthropic_turns.py")
    found = json.loads(run(script, router.url).splitlines()[-1])

    first, second = found["first"], found["second"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"] > 0
    assert found["counted"] == sum(second[part] for part in parts)
    assert found["is_text_whole"]
    assert "no-such-model" in found["unknown_model"]
    assert "not_found_error" in found["unknown_model"]
    assert "input_schema" in found["server_tool"]
    for result, num in before.items():
        assert router.metric("warmroute_audited_total", result=result) == num


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllms_own_benchmark(router: Router, tmp_path: Path, backend: str) -> None:
    """All prompts are answered, half of each from what another one left."""
    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    before = router.metric("warmroute_tokenized_requests_total", way="local")
    num_before = len(prompts(router))
    run(
        "-c", _BENCH_SERVE,
        "--backend", backend, "--base-url", router.url, "--endpoint", endpoint,
        "--model", "tiny", "--tokenizer", MODEL_DIR,
        "--dataset-name", "random", "--num-prompts", "12", "--max-concurrency", "2",
        "--random-prefix-len", "320", "--random-input-len", "320", "--random-output-len", "8",
        "--save-result", "--result-dir", tmp_path, "--result-filename", "found.json",
    )  # fmt: skip
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())

    assert found["completed"] == 12
    assert found["total_output_tokens"] == 12 * 8
    wait_until(lambda: len(prompts(router)) >= num_before + 12, 30, "the records")
    cached = [each["num_reported_cached_tokens"] or 0 for each in prompts(router)[num_before:]]
    assert sum(cached) >= 8 * 288
    assert router.metric("warmroute_tokenized_requests_total", way="local") >= before + 12
