"""Engines whose token ids are not the router's, though they are as many; and other prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from tests.faults.stage import INSTANT, Stage, chat, on_stage, words
from tests.tokens.splits import Side, model_with

LOOKING = {"health__interval_s": 0.05, "tokens__prove_ratio": 1.0}
YEARS = " ".join(["2000"] * 1200)
"""Each is `200|0` from the left and `2|000` from the right."""


@asynccontextmanager
async def engines(folder: Path, *sides: Side) -> AsyncIterator[list[Emulator]]:
    """Run an engine for each side that its tokenizer takes digits from."""
    made = []
    for number, side in enumerate(sides):
        model = model_with(folder / f"engine{number}", side)
        options = EmulatorOptions(model_dir=Path(model), time_model=INSTANT)
        made.append(Emulator(options))
    try:
        yield [await each.__aenter__() for each in made]
    finally:
        for each in made:
            await each.__aexit__(None, None, None)


async def answer(stage: Stage, number: int, **fields: Any) -> None:
    reply = await stage.ask(chat(f"{words(number)} {YEARS}", **fields))
    assert reply.status == 200


@pytest.mark.parametrize("mode", ["auto", "on"])
async def test_ids_are_not_handed_over_before_they_were_compared(tmp_path: Path, mode: str) -> None:
    """Counts agree for every prompt, and not one is handed over; the log says what differs."""
    ours = {"tiny": model_with(tmp_path / "router", "right")}
    settings = LOOKING | {"tokens__models": ours, "tokens__hand_over": mode}
    async with engines(tmp_path, "left") as made, on_stage(*made, **settings) as stage:
        for number in range(10):
            await answer(stage, number)
        await stage.until(lambda: stage.metric("warmroute_token_mismatches_total", against="ids"))
        for number in range(10, 20):
            await answer(stage, number)

        assert stage.metric("warmroute_token_mismatches_total", against="usage") == 0
        assert stage.metric("warmroute_handed_over_requests_total") == 0
        assert "the engine splits '2024' (digits) as 202|4, this router as 2|02|4" in stage.log
        assert "install the releases of transformers and tokenizers" in stage.log


async def test_after_a_difference_the_engine_tokenizes(tmp_path: Path) -> None:
    """Predictions are right again, and stay so: other ids do not become the same with time."""
    ours = {"tiny": model_with(tmp_path / "router", "right")}
    settings = LOOKING | {"tokens__models": ours}
    async with engines(tmp_path, "left") as made, on_stage(*made, **settings) as stage:
        await stage.until(lambda: stage.metric("warmroute_token_mismatches_total", against="ids"))
        first = await stage.ask(chat(f"{words(1)} {YEARS}"))
        await stage.settled(*made)
        second = await stage.ask(chat(f"{words(1)} {YEARS}", first.text, words(2)))

        assert second.predicted == second.reported > 0
        assert stage.metric("warmroute_tokenized_requests_total", way="engine") == 2
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        assert not prompter.trust.try_again(now_s=1e9)


async def test_one_replica_of_another_release_gets_no_ids(tmp_path: Path) -> None:
    """The others do, and the model is tokenized here: trust is each process's own."""
    ours = {"tiny": model_with(tmp_path / "router", "right")}
    settings = LOOKING | {"tokens__models": ours, "policy__name": "round_robin"}
    async with engines(tmp_path, "right", "left", "right") as made:
        async with on_stage(*made, **settings) as stage:
            other = next(r.name for r in stage.router.fleet.replicas if r.url == made[1].url)
            for number in range(30):
                await answer(stage, number)
            await stage.until(lambda: len(stage.router.hand_over._takes) == 2)
            await stage.until(
                lambda: stage.metric("warmroute_token_mismatches_total", against="ids")
            )
            for number in range(30, 42):
                await answer(stage, number)

            assert all(name != other for name, _, _ in stage.router.hand_over._takes)
            assert stage.metric("warmroute_handed_over_requests_total") > 0
            assert "none are handed over to this replica" in stage.log
            assert stage.metric("warmroute_tokenized_requests_total", way="engine") == 0


async def test_the_next_process_is_compared_again(tmp_path: Path) -> None:
    """An engine that starts again with the router's release is trusted again."""
    ours = {"tiny": model_with(tmp_path / "router", "left")}
    settings = LOOKING | {"tokens__models": ours}
    async with engines(tmp_path, "left") as made, on_stage(*made, **settings) as stage:
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        await stage.until(lambda: prompter.trust.has_compared("r1"))
        assert prompter.trust.reason is None
        prompter.trust.forget("r1")

        await stage.until(lambda: prompter.trust.has_compared("r1"))
