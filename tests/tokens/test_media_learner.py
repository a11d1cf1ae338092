"""Names of images and sounds, learned from events: vLLM's own digests of recorded prompts."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from router.contracts import NO_EXTRA, ExtraKeys, MediaSpan, block_key
from router.tokens import Tokens
from router.tokens.media_book import KnownMedia, MediaBook
from router.tokens.media_learner import MediaLearner, Unseen
from tests.tokens.record_vision import BLOCK_SIZE
from tests.tokens.test_vision import CONTRACT, PROMPTS, Setup

SESSION = "a-session"
WITH_ITEMS = [number for number, (_, prompt) in enumerate(PROMPTS) if prompt["places"]]


class Stored(NamedTuple):
    """A prompt's blocks as events have them."""

    hashes: list[int]
    extra_keys: list[list[list[Any]] | None]

    def parent(self, position: int) -> int | None:
        return self.hashes[position - 1] if position else None


class Sent(NamedTuple):
    """A prompt that was sent with items of which the names are to be learned."""

    book: MediaBook
    keys: list[int]  # of its items, under which the book has them
    names: list[str]
    tokens: Tokens
    unseen: Unseen
    stored: Stored

    def learned(self) -> list[str | None]:
        """List what is known of each item; None: no name."""
        found = [self.book.get(key) for key in self.keys]
        return [each.name if each is not None and each.is_named else None for each in found]

    def num_to_learn(self) -> int:
        """Count the items that begin in a full block."""
        starts = [span.start for span in self.tokens.media_spans()]
        return sum(start // BLOCK_SIZE < len(self.stored.hashes) for start in starts)


def send(setup: Setup, number: int, *, named: int = 0) -> Sent:
    """Make a recorded prompt with names of ours for its items but the first `named`."""
    body, prompt = PROMPTS[number]
    request, texts = setup.texts(body)
    keys, items = [], []
    for key, ((start, end), name) in enumerate(zip(prompt["places"], prompt["names"], strict=True)):
        # The same item has the same key, as it has the same bytes.
        key = prompt["names"].index(name)
        is_named = key < named
        known = KnownMedia(
            name if is_named else f"{key}?", array("I", prompt["ids"][start:end]), is_named, (key,)
        )
        setup.book.put(key, known)
        keys.append(key)
        items.append(known)
    plan = setup.prompter.plan_media(request, texts, items)
    tokens = setup.prompter.commit(plan, plan.encode())
    assert tokens.ids() == prompt["ids"]
    extra_keys: list[list[list[Any]] | None] = []
    for start in range(0, len(prompt["digests"]) * BLOCK_SIZE, BLOCK_SIZE):
        inside = [
            [name, first - start]
            for (first, end), name in zip(prompt["places"], prompt["names"], strict=True)
            if first < start + BLOCK_SIZE and end > start
        ]
        extra_keys.append(inside or None)
    hashes = [int.from_bytes(bytes.fromhex(digest), "big") for digest in prompt["digests"]]
    unseen = Unseen(setup.book, {item.name: item for item in items})
    return Sent(setup.book, keys, prompt["names"], tokens, unseen, Stored(hashes, extra_keys))


@pytest.fixture(name="setup")
def make_setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "model")


@pytest.mark.parametrize("step", [1, 2, 5, 10_000])
def test_names_are_learned_from_the_events_of_a_prompt(setup: Setup, step: int) -> None:
    """Of every item that begins in a full block, whatever the engine's steps; twice the same."""
    num_learned = 0
    for number in WITH_ITEMS:
        sent, learner = send(setup, number), MediaLearner()
        learner.expect(SESSION, sent.unseen, sent.tokens, CONTRACT, NO_EXTRA)

        for start in range(0, len(sent.stored.hashes), step):
            end = start + step
            learner.observe(
                SESSION,
                sent.stored.parent(start),
                sent.stored.hashes[start:end],
                sent.stored.extra_keys[start:end],
            )

        expected = sent.names[: sent.num_to_learn()]
        rest = [name if name in expected else None for name in sent.names[len(expected) :]]
        assert sent.learned() == [*expected, *rest]
        assert not len(learner)
        num_learned += len(expected)
    assert num_learned > 20


def test_a_computed_name_is_corrected(setup: Setup) -> None:
    """An engine that hashes in another way is believed."""
    sent, learner = send(setup, WITH_ITEMS[-1], named=9), MediaLearner()
    for key in sent.keys:
        known = sent.book.get(key)
        assert known is not None
        sent.book.put(key, known._replace(name="computed"))
    unseen = Unseen(sent.book, dict(sent.unseen.items))
    learner.expect(SESSION, unseen, sent.tokens, CONTRACT, NO_EXTRA)

    learner.observe(SESSION, None, sent.stored.hashes, sent.stored.extra_keys)

    assert set(sent.names[: sent.num_to_learn()]) <= set(sent.learned())


def test_nothing_else_is_learned_from(setup: Setup) -> None:
    """Other sessions, other blocks, other names, other sizes, adapters: the item has no name."""
    sent = send(setup, WITH_ITEMS[0])
    hashes, extra_keys = sent.stored
    wrong_names = [[["other", at] for _, at in keys] if keys else None for keys in extra_keys]
    wrong_hashes = [each + 1 for each in hashes]
    none: list[None] = [None] * len(hashes)
    for session, parent, stored, names in (
        ("another", None, hashes, extra_keys),
        (SESSION, None, wrong_hashes, extra_keys),
        (SESSION, None, hashes, wrong_names),
        (SESSION, None, hashes, none),
        (SESSION, None, hashes, extra_keys[:-1]),
        (SESSION, None, hashes, [["salt"], *none[1:]]),
        (SESSION, None, hashes, [[[1, 2], ["x"], "y"]] * len(hashes)),
        (SESSION, None, [], []),
    ):
        learner = MediaLearner()
        learner.expect(SESSION, sent.unseen, sent.tokens, CONTRACT, NO_EXTRA)
        learner.observe(session, parent, stored, names)

        assert set(sent.learned()) == {None}
        assert len(learner) == 1

        learner.observe(SESSION, None, hashes, extra_keys)
        assert None not in sent.learned()[: sent.num_to_learn()], "it goes on waiting"
        sent = send(setup, WITH_ITEMS[0])
    learner = MediaLearner()
    learner.expect(SESSION, sent.unseen, sent.tokens, CONTRACT, ExtraKeys(lora=("sql", "/sql")))
    assert not len(learner)


def test_what_is_forgotten_is_not_learned(setup: Setup) -> None:
    """An engine counted otherwise in the meantime: the item is unknown."""
    sent, learner = send(setup, WITH_ITEMS[0]), MediaLearner()
    learner.expect(SESSION, sent.unseen, sent.tokens, CONTRACT, NO_EXTRA)
    sent.book.observe_count(False, 0.0)

    learner.observe(SESSION, None, sent.stored.hashes, sent.stored.extra_keys)

    assert [sent.book.get(key) for key in sent.keys] == [None] * len(sent.keys)


def test_few_are_waited_for(setup: Setup) -> None:
    """Of requests whose events never come the oldest go."""
    sent, learner = send(setup, WITH_ITEMS[0]), MediaLearner()
    for number in range(1_000):
        learner.expect(str(number), sent.unseen, sent.tokens, CONTRACT, NO_EXTRA)

    assert len(learner) == 256
    learner.observe("0", None, sent.stored.hashes, sent.stored.extra_keys)
    assert set(sent.learned()) == {None}


def test_digests_are_named_as_blocks_are(setup: Setup) -> None:
    """The recorded hashes are those of the prompt under its real names."""
    sent = send(setup, WITH_ITEMS[0], named=99)

    keys = list(sent.tokens.keys(CONTRACT))

    assert keys == [block_key(each) for each in sent.stored.hashes]


@pytest.mark.parametrize("step", [1, 3, 10_000])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_names_are_learned_where_hashes_cover_the_next_tokens(
    setup: Setup, lookahead: int, step: int
) -> None:
    """The block before an item has its name in it, too, if the item begins right behind it."""
    contract = replace(CONTRACT, lookahead=lookahead)
    num_learned = 0
    for number in WITH_ITEMS:
        sent, learner = send(setup, number), MediaLearner()
        ids, places = PROMPTS[number][1]["ids"], PROMPTS[number][1]["places"]
        spans = [MediaSpan(n, *at) for n, at in zip(sent.names, places, strict=True)]
        digests = contract.digests(None, ids, NO_EXTRA, spans)
        extra_keys: list[list[list[Any]] | None] = []
        for start in range(0, len(digests) * BLOCK_SIZE, BLOCK_SIZE):
            end = start + BLOCK_SIZE + lookahead
            extra_keys.append(
                [[s.identifier, s.start - start] for s in spans if s.start < end and s.end > start]
                or None
            )
        stored = Stored([int.from_bytes(each[-8:], "big") for each in digests], extra_keys)
        learner.expect(SESSION, sent.unseen, sent.tokens, contract, NO_EXTRA)

        for at in range(0, len(digests), step):
            until = at + step
            learner.observe(
                SESSION, stored.parent(at), stored.hashes[at:until], extra_keys[at:until]
            )

        seen = {name for keys in extra_keys for name, _ in keys or ()}
        assert sent.learned() == [name if name in seen else None for name in sent.names]
        assert not len(learner)
        num_learned += len(seen)

    assert num_learned > 10
