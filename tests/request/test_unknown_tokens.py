"""Prompts without token ids follow their session: its last replica is credited with its prompt."""

from __future__ import annotations

from tests.faults.stage import Engines, Json, Stage, chat, on_stage, words

UNKNOWN: Json = {"tokens__tokenizer_modes": {"tiny": "harmony"}}
"""Not the engines' tokenizer mode. In this mode the engine does not tokenize chats, either."""


async def found_wrong(stage: Stage) -> None:
    """Send prompts until both replicas have counted other tokens, so that chats have no ids."""
    prompter = stage.router.prompters.get("tiny")
    assert prompter is not None
    for number in range(100, 150):
        await stage.ask(chat(words(number)), headers={"X-Session-ID": str(number)})
        if prompter.trust.reason is not None:
            return
    raise AssertionError("the router's tokens are still used")


async def test_a_session_stays_at_its_replica() -> None:
    """The prompt is cached there. No figure is given, because the credit is a guess."""
    async with Engines(2) as engines, on_stage(*engines, **UNKNOWN) as stage:
        await found_wrong(stage)
        num_audited = stage.metric("warmroute_audited_total")
        replies = []
        texts = [words(1, 200)]
        for _ in range(4):
            reply = await stage.ask(chat(*texts), headers={"X-Session-ID": "a"})
            texts += [reply.text, words(len(texts), 30)]
            await stage.settled(*engines)
            replies.append(reply)

        assert len({reply.replica for reply in replies}) == 1
        assert all(reply.reported > 0 for reply in replies[1:])
        assert not any("x-warmroute-cached" in reply.headers for reply in replies)
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 4
        assert stage.metric("warmroute_audited_total") == num_audited


async def test_sessions_without_tokens_spread() -> None:
    """A new session has no credit anywhere, so it goes to the replica with less load."""
    async with Engines(2) as engines, on_stage(*engines, **UNKNOWN) as stage:
        await found_wrong(stage)
        homes = {
            (await stage.ask(chat(words(1, 200)), headers={"X-Session-ID": str(n)})).replica
            for n in range(8)
        }

        assert homes == {"r1", "r2"}
