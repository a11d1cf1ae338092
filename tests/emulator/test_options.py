"""Options that contradict each other are refused; times add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS, StepWork, TimeModel


def test_the_longest_sequence_is_what_model_and_cache_allow(tmp_path: Path) -> None:
    """The smaller of the model's positions and the usable blocks; a nested text config counts."""
    assert EmulatorOptions(num_gpu_blocks=11, block_size=16).model_len() == 160
    assert EmulatorOptions(model_dir=tmp_path).model_len() == 131_072
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 99}}')
    assert EmulatorOptions(model_dir=tmp_path).model_len() == 99
    assert EmulatorOptions(max_model_len=50).model_len() == 50


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_gpu_blocks": 10, "max_model_len": 1000}, "max_model_len"),
        ({"block_size": 0}, "must be positive"),
        ({"speed": 0.0}, "must be positive"),
        ({"cpu_blocks": -1}, "cpu_blocks"),
        ({"ms_per_cpu_token": -0.1}, "cpu_blocks"),
        ({"cpu_blocks": 9, "pool": "http://127.0.0.1:9"}, "cpu_blocks"),
        ({"cpu_blocks": 9, "sliding_window": 64}, "cpu_blocks"),
        ({"cpu_blocks": 9, "eagle": True}, "cpu_blocks"),
        ({"cpu_blocks": 9, "lookahead": 1}, "cpu_blocks"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, Any], said: str) -> None:
    """A sequence or a number that cannot be, and a CPU tier that vLLM would not have."""
    with pytest.raises(ValueError, match=said):
        EmulatorOptions(**wrong).model_len()


def test_a_step_costs_the_sum_of_its_parts() -> None:
    """Each parameter times what it counts, in seconds."""
    model = TimeModel(
        base_ms=1.0,
        ms_per_prefill_token=0.1,
        ms_per_mtoken2=2.0,
        ms_per_decode=0.5,
        ms_per_mtoken_context=10.0,
    )
    work = StepWork(
        num_prefill_tokens=100,
        num_prefill_pairs=1e6,
        num_decodes=4,
        num_decode_context_tokens=200_000,
    )

    assert model.step_s(work) == pytest.approx(1e-3 * (1.0 + 10.0 + 2.0 + 2.0 + 2.0))
    assert PRESETS["instant"].step_s(work) == 0.0
