"""Engines whose token ids are not the router's, though they are as many; and other prompts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from tests.check.running import checked, finding
from tests.faults.stage import INSTANT, Stage, chat, on_stage, words
from tests.tokens.splits import Side, model_with
from tests.tokens.vllm_routes import HERE

LOOKING = {"health__interval_s": 0.05, "tokens__prove_ratio": 1.0}
YEARS = " ".join(["2000"] * 1200)
"""Each is `200|0` from the left and `2|000` from the right."""


HEAD = (HERE / "templates" / "defaults" / "head.jinja").read_text()
"""Its argument `enable_thinking` changes a prompt's beginning."""


AS_TEXT = {"tokens__content_formats": {"tiny": "string"}}
"""As emulated engines have it: --chat-template-content-format string."""


@asynccontextmanager
async def engines(
    folder: Path, *sides: Side, template: str | None = None, **options: Any
) -> AsyncIterator[list[Emulator]]:
    """Run an engine for each side that its tokenizer takes digits from."""
    made = []
    for number, side in enumerate(sides):
        model = Path(model_with(folder / f"engine{number}", side, template=template))
        made.append(Emulator(EmulatorOptions(model_dir=model, time_model=INSTANT, **options)))
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
            other = next(
                r.name for r in stage.router.fleet.members.replicas if r.url == made[1].url
            )
            for number in range(30):
                await answer(stage, number)
            await stage.until(
                lambda: stage.metric("warmroute_token_mismatches_total", against="ids")
            )
            for number in range(30, 42):
                await answer(stage, number)

            prompter = stage.router.prompters.get("tiny")
            assert prompter is not None
            assert prompter.trust.disagrees(other)
            assert stage.metric("warmroute_handed_over_requests_total") > 0
            assert "none are sent to this replica" in stage.log
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


async def test_other_template_arguments_end_local_tokens(tmp_path: Path) -> None:
    """Each prompt begins differently: the engine tokenizes, and one line says what to set."""
    flags = {"chat_template_kwargs": {"enable_thinking": False}}
    async with engines(tmp_path, "left", template=HEAD, **flags) as made:
        async with on_stage(*made, **(LOOKING | AS_TEXT)) as stage:
            await stage.until(
                lambda: stage.metric("warmroute_token_mismatches_total", against="ids")
            )
            first = await stage.ask(chat(words(1)))
            await stage.settled(*made)
            second = await stage.ask(chat(words(1), first.text, words(2)))

            assert second.predicted == second.reported > 0
            [hint] = [
                json.loads(line)["hint"] for line in stage.log.splitlines() if '"hint":' in line
            ]
            assert "--default-chat-template-kwargs" in hint
            assert "tokens.chat_template_kwargs" in hint


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_ids_are_compared_as_soon_as_the_tokenizer_is_loaded(
    tmp_path: Path, path: str
) -> None:
    """Else a conversation's first predictions are wrong: one replica's count proves nothing."""
    flags = {"chat_template_kwargs": {"enable_thinking": False}}
    async with (
        engines(tmp_path, "left", "left", template=HEAD, **flags) as made,
        on_stage(*made, **AS_TEXT, health__interval_s=60.0) as stage,
    ):
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        await stage.until(lambda: len(prompter.trust.differences()) == 2)
        for texts in ((words(1),), (words(1), "yes", words(2))):
            body = chat(*texts)
            if path == "/v1/responses":
                body = {"model": "tiny", "input": body["messages"], "max_output_tokens": 4}
            reply = await stage.ask(body, path)
            assert reply.status == 200
            await stage.settled(*made)

        assert reply.predicted > 0
        assert stage.metric("warmroute_audited_total", result="under") == 0
        assert stage.metric("warmroute_audited_total", result="over") == 0


async def test_default_template_arguments_may_be_set(tmp_path: Path) -> None:
    """Then prompts are made here, and the ids are the engine's."""
    defaults = {"enable_thinking": False}
    settings = LOOKING | AS_TEXT | {"tokens__chat_template_kwargs": {"tiny": defaults}}
    async with engines(tmp_path, "left", template=HEAD, chat_template_kwargs=defaults) as made:
        async with on_stage(*made, **settings) as stage:
            prompter = stage.router.prompters.get("tiny")
            assert prompter is not None
            await stage.until(lambda: prompter.trust.has_compared("r1"))
            first = await stage.ask(chat(words(1)))
            await stage.settled(*made)
            second = await stage.ask(chat(words(1), first.text, words(2)))

            assert second.predicted == second.reported > 0
            assert stage.metric("warmroute_tokenized_requests_total", way="local") == 2
            assert stage.metric("warmroute_token_mismatches_total") == 0


@pytest.mark.parametrize("side", ["left", "right"])
async def test_check_compares_ids(tmp_path: Path, side: Side) -> None:
    """It says so, or where they differ and what to do."""
    ours = {"tiny": model_with(tmp_path / "router", side)}
    async with engines(tmp_path, "left") as (engine,):
        found = finding(await checked(engine, tokens__models=ours), "replica r1", "tokenizer")
    if side == "left":
        assert "have the engine's token ids" in found.text
    else:
        assert (found.level, "splits '2024' (digits) as 202|4" in found.text) == ("error", True)
        assert "transformers" in found.hint


async def test_another_content_format_is_an_error_until_it_is_set(tmp_path: Path) -> None:
    """The template takes parts, and the engine was told to give it text."""
    async with engines(tmp_path, "left", template=HEAD) as (engine,):
        unset = finding(await checked(engine), "replica r1", "tokenizer")
        given = finding(await checked(engine, **AS_TEXT), "replica r1", "tokenizer")

    assert (unset.level, given.level) == ("error", "ok")
    assert "tokens.content_formats" in unset.hint
