"""Prompts without token ids follow their session: its last replica is credited with its prompt."""

from __future__ import annotations

from tests.faults.stage import Engines, Json, chat, on_stage, words

UNKNOWN: Json = {
    "tokens__tokenizer_modes": {"tiny": "custom"},
    "tokens__engine_timeout_s": 1e-6,
}
"""A tokenizer mode that the router does not know, and engines that tokenize too late."""


async def test_a_session_stays_at_its_replica() -> None:
    """The prompt is cached there. No figure is given, because the credit is a guess."""
    async with Engines(2) as engines, on_stage(*engines, **UNKNOWN) as stage:
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
        assert not stage.metric("warmroute_audited_total")


async def test_sessions_without_tokens_spread() -> None:
    """A new session has no credit anywhere, so it goes to the replica with less load."""
    async with Engines(2) as engines, on_stage(*engines, **UNKNOWN) as stage:
        homes = {
            (await stage.ask(chat(words(1, 200)), headers={"X-Session-ID": str(n)})).replica
            for n in range(8)
        }

        assert homes == {"r1", "r2"}
