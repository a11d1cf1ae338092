"""`warmroute replay` and real engines: equal hash ids are equal blocks, and no others are."""

from __future__ import annotations

import httpx
from tokenizers import Tokenizer

from loadtest.runner import ReplayOptions, replay
from loadtest.text import Prompts, of_tokenizer
from loadtest.workload import Turn, Workload
from tests.engines.harness import BLOCK_SIZE, MODEL_DIR, Engine, Router

PROMPTS = (
    (1, 2, 3, 4, 5),
    (1, 2, 3, 4, 5, 6, 7),  # goes on
    (1, 2, 8, 9),  # branches off
    (10, 11),  # another session
    (1, 2, 3, 4, 5, 6, 7),  # the same once more: its last block is computed again
    (10, 11, 12),
)
LEADING = (0, 5, 2, 0, 7, 2)  # ids of each that came before, in one row


def workload(block_size: int) -> Workload:
    """One session that sends `PROMPTS` in turn; the last block of each is whole."""
    return Workload(
        name="branches",
        block_size=block_size,
        turns=tuple(
            Turn(
                session_id="s",
                number=number,
                arrival_s=0.0,
                num_input_tokens=block_size * len(blocks),
                num_output_tokens=4,
                hash_ids=blocks,
                after=(("s", number - 1),) if number else (),
            )
            for number, blocks in enumerate(PROMPTS)
        ),
    )


def cached_tokens(block_size: int) -> list[int]:
    """Say what one engine finds: at least the last token is computed, and so its whole block."""
    return [
        min(leading * block_size, len(blocks) * block_size - BLOCK_SIZE)
        for leading, blocks in zip(LEADING, PROMPTS, strict=True)
    ]


async def test_hash_ids_repeat_as_blocks(replicas: tuple[Engine, Engine]) -> None:
    """A real engine finds the blocks that the workload says, to the block; a salt finds none."""
    for block_size, salt in ((BLOCK_SIZE, ""), (2 * BLOCK_SIZE, "other")):
        run = await replay(
            workload(block_size),
            replicas[0].url,
            options=ReplayOptions(loop="closed", salt=salt),
        )

        assert [turn.error for turn in run.turns] == [None] * len(PROMPTS)
        found = [turn.num_cached_tokens for turn in run.turns]
        assert found == cached_tokens(block_size)


async def test_the_router_predicts_a_replay(router: Router) -> None:
    """Through warmroute: same blocks, each of them predicted."""
    run = await replay(
        workload(BLOCK_SIZE), router.url, options=ReplayOptions(loop="closed", salt="routed")
    )

    assert run.info.is_complete
    for turn in run.turns:
        assert turn.predicted is not None
        assert turn.predicted.total == turn.num_cached_tokens
    assert {turn.replica for turn in run.turns[:3]} == {run.turns[0].replica}
    assert [turn.num_cached_tokens for turn in run.turns][:3] == cached_tokens(BLOCK_SIZE)[:3]


def test_words_are_the_tokens_they_stand_for(replicas: tuple[Engine, Engine]) -> None:
    """The engine's own tokenizer reads a prompt's text as the ids that were meant."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    made = Prompts(of_tokenizer(tokenizer), BLOCK_SIZE)
    for turn in workload(BLOCK_SIZE).turns:
        answer = httpx.post(
            f"{replicas[0].url}/tokenize",
            json={"model": "tiny", "prompt": made.text(turn), "add_special_tokens": False},
            timeout=60,
        )
        assert answer.json()["tokens"] == list(made.token_ids(turn))
