"""Sessions whose tokens the router does not know, by the blocks that real engines attribute."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.harness import BLOCK_SIZE, NUM_BLOCKS, Engine, Router, wait_until

SYSTEM = {"role": "system", "content": "You answer in few words, and never say why. " * 60}


@pytest.fixture
def blind(start_router: Callable[..., Router], replicas: tuple[Engine, Engine]) -> Iterator[Router]:
    """Run a router that takes the model for one of a mode whose chats it cannot write."""
    settings = {
        "replicas": [{"url": engine.url} for engine in replicas],
        "tokens": {"tokenizer_modes": {"tiny": "harmony"}},
    }
    with start_router(config=settings) as router:
        yield router


class Session:
    """A conversation that its client does not name."""

    def __init__(self, router: Router, name: str) -> None:
        self._router = router
        self._messages: list[dict[str, Any]] = [SYSTEM, self._user(f"I am {name}.")]
        self.home = ""
        self.num_prompt_tokens = 0

    @staticmethod
    def _user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": f"{text} What comes next? " * 6}

    @property
    def body(self) -> dict[str, Any]:
        return {"model": "tiny", "messages": self._messages, "max_tokens": 20, "temperature": 0}

    def turn(self) -> tuple[int | None, int]:
        """Take a turn; return how many tokens were predicted to be cached, and how many were.

        Ends when what it stored is known.
        """
        answer = self._router.chat(self.body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        header = answer.headers.get("x-warmroute-cached")
        self.home = answer.headers["x-warmroute-replica"]
        self.num_prompt_tokens = usage["prompt_tokens"]
        self._messages.append(
            {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
        )
        self._messages.append(self._user(f"This is message {len(self._messages)}."))
        least = self.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
        wait_until(lambda: self.known() >= least, 20, f"{least} tokens to be known")
        predicted = None if header is None else int(header.split(";")[0].removeprefix("gpu="))
        return predicted, (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    def known(self, replica: str | None = None) -> int:
        """Return how many tokens of the next turn a replica is believed to hold."""
        return self._router.num_known_tokens(self.body)[replica or self.home]


def flood(engine: Engine, num_blocks: int, seed: int) -> None:
    """Have an engine compute prompts that the router does not see, of so many blocks."""
    dice = random.Random(seed)
    while num_blocks > 0:
        num = min(num_blocks, 400)
        engine.complete([dice.randrange(300, 2_000) for _ in range(num * BLOCK_SIZE)])
        num_blocks -= num


def test_a_session_without_tokens_is_predicted_and_moves(
    blind: Router, replicas: tuple[Engine, Engine]
) -> None:
    """By its own turns, by what is left of them, and by its system prompt at another replica."""
    session = Session(blind, "one")
    first = session.turn()
    turns = [session.turn() for _ in range(4)]

    assert first[0] is None
    assert all(predicted == reported > 800 for predicted, reported in turns), turns
    assert turns[-1][1] > turns[0][1]
    assert blind.metric("warmroute_tokenized_requests_total", way="unknown") >= 5
    assert blind.metric("warmroute_tokenized_requests_total", way="engine") == 0

    held, engine = session.known(), replicas[0 if session.home == "r1" else 1]
    num_blocks = NUM_BLOCKS - 1 - held // BLOCK_SIZE + 8  # eight of its blocks have to go
    flood(engine, num_blocks, seed=1)
    wait_until(lambda: session.known() < held, 20, "an eviction")
    predicted, reported = session.turn()

    assert predicted == reported
    assert 0 < reported < held

    home, other = session.home, replicas[1 if session.home == "r1" else 0]
    other.chat({"model": "tiny", "messages": [SYSTEM, Session._user("Hi")], "max_tokens": 1})
    wait_until(lambda: session.known(other.name) > 0, 20, "the system prompt elsewhere")
    flood(engine, NUM_BLOCKS, seed=2)
    wait_until(lambda: session.known(home) == 0, 20, "nothing to be left")
    predicted, reported = session.turn()

    assert session.home == other.name != home
    assert predicted == reported > 500
    predicted, reported = session.turn()
    assert session.home == other.name
    assert predicted == reported > 800
    assert blind.metric("warmroute_audited_total", result="exact") == 7
    assert blind.metric("warmroute_audited_total") == 7


def test_a_shared_beginning_that_another_session_stored_is_counted(blind: Router) -> None:
    """No event of this session names the system prompt's blocks: usage says how many they are."""
    one, two = Session(blind, "one"), Session(blind, "two")
    one.turn()
    blind.drain("r2" if one.home == "r1" else "r1")
    first = two.turn()
    turns = [two.turn() for _ in range(3)]

    assert first[1] > 500
    assert all(predicted == reported > first[1] for predicted, reported in turns), turns
