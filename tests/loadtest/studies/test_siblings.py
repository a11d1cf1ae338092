"""loadtest.studies.siblings: what is drawn, sent and shown; real engines are for the study."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from rich.progress import Progress

from loadtest.emulator.emulator import Emulator
from loadtest.results import TurnResult
from loadtest.studies import siblings
from loadtest.studies.pair import Arm, Pair
from loadtest.studies.siblings import Bursts, Run, main, report, send
from tests.faults.stage import Engines

SHAPE = Bursts(num_bursts=2, num_siblings=3, num_shared_tokens=160, own_tokens=(20, 40))


def sibling(ttft_s: float, num_computed_tokens: int) -> TurnResult:
    return TurnResult(
        session_id="s",
        number=0,
        start_s=0.0,
        total_s=ttft_s,
        ttft_s=ttft_s,
        num_prompt_tokens=num_computed_tokens,
        num_cached_tokens=0,
    )


class Direct:
    """No router: an engine itself."""

    def __init__(self, engine: Emulator) -> None:
        self._engine = engine

    @asynccontextmanager
    async def in_front(self, arm: Arm) -> AsyncIterator[str]:
        yield self._engine.url


def test_a_draw_is_the_same_again_and_siblings_share_their_beginning() -> None:
    """Of one burst, and of no other."""
    bursts = SHAPE.draw(1)

    assert bursts == SHAPE.draw(1) != SHAPE.draw(2)
    assert [len(burst) for burst in bursts] == [3] * 5
    beginnings = [{tuple(prompt[:160]) for prompt in burst} for burst in bursts]
    assert [len(each) for each in beginnings] == [1] * 5
    assert len(set.union(*beginnings)) == 5
    assert all(180 <= len(prompt) <= 200 for burst in bursts for prompt in burst)


async def test_what_an_engine_computed_of_the_bursts_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each burst is asked at once; the first ones are left out."""
    monkeypatch.setattr(siblings, "_PAUSE_S", 0.0)
    bursts = SHAPE.draw(1)
    async with Engines(1) as (engine,), asyncio.timeout(60):
        with Progress(disable=True) as progress:
            run = await send(cast(Pair, Direct(engine)), Arm(label="x"), 1, bursts, progress)

    counted = [prompt for burst in bursts[3:] for prompt in burst]
    assert len(run.siblings) == len(counted)
    num_least = 2 * 160 + sum(len(prompt) - 160 for prompt in counted)
    assert num_least <= sum(each.num_recomputed_tokens for each in run.siblings) < 2 * num_least
    assert all(0.0 < (each.ttft_s or 0.0) < 60.0 for each in run.siblings)


def test_arms_stand_beside_each_other() -> None:
    """Means by seed with their spread, the longest, and all tokens."""
    runs = [Run("a", 1, [sibling(1.0, 10), sibling(2.0, 20)]), Run("a", 2, [sibling(0.5, 7)]),
            Run("b", 1, [sibling(4.0, 1)])]  # fmt: skip

    lines = report(runs).splitlines()

    assert lines[2:4] == ["| `a` | 1.00 (0.50 to 1.50) | 2.0 | 37 |", "| `b` | 4.00 | 4.0 | 1 |"]
    assert lines[-1] == "Seeds 1, 2."


@pytest.mark.parametrize(
    "wrong", [["--bursts", "0"], ["--arms", "kv_aware:queue.patient=1"], ["--seeds", "x"]]
)
def test_a_wrong_argument_is_said_so(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before any engine starts."""
    with pytest.raises(SystemExit) as ended:
        main(wrong)

    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
