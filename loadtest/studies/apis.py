"""Predicted against reported cached tokens by each API, on two real engines behind one router.

    python -m loadtest.studies.apis                    300 turns by each API, some ten minutes
    python -m loadtest.studies.apis --router URL       behind a router that runs already

Agents' sessions with tools, a third of them by each API, in rotation and one request at a time, so
every request is settled: nothing changes a cache between the decision and the engine's look-up.
Eighteen at once are more than both caches hold, so some of what a turn left is evicted before the
next. Half of the sessions are sampled at temperature 1, so that a model without weights says what
tokenizes anew. What is predicted is in the answer's header, what is reported in its usage.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import orjson
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.agents import Profile, Session, make_sessions
from loadtest.engines.process import all_up
from loadtest.engines.vllm import BLOCK_SIZE, Engine
from loadtest.markdown import table
from loadtest.results import parse_predicted
from loadtest.runner.sending import make_client
from loadtest.runner.stack import start_router
from loadtest.studies.api_turns import APIS, PATHS, Api, body_of, read
from loadtest.studies.measured import interrupt_on_sigterm, measured

NUM_TURNS: Final = 300  # by each API, at least
NUM_AT_ONCE: Final = 6  # sessions by each API, an even number
SETTLE_S: Final = 0.1  # for the events of the step before
PROFILE: Final = Profile(
    num_turns=8,
    turns_sigma=0.3,
    scale_tokens=0.12,  # 1,400 tokens first, 4,000 to 8,000 at the end
    max_context_tokens=100_000,  # 12,000 scaled: half of an engine's cache
    sub_agent_share=0.0,
    num_output_tokens=60,
    salts=(None, None, "t1"),
)
_WILD: Final = {"temperature": 1.0}
_SILENCE_S: Final = 120.0


class ApiTurn(Struct, frozen=True, kw_only=True):
    """One turn; tokens. `predicted` is None where the router knew no tokens."""

    api: Api
    session_id: str
    number: int
    replica: str | None
    predicted: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_left_tokens: int  # full blocks of the prompt before it in the session

    @property
    def is_right(self) -> bool:
        return self.predicted == self.num_cached_tokens


class _Conversation:
    """A session by one API."""

    __slots__ = ("api", "num_left_tokens", "session")

    def __init__(self, api: Api, session: Session) -> None:
        self.api: Api = api
        self.session = session
        self.num_left_tokens = 0

    async def take(self, client: aiohttp.ClientSession) -> ApiTurn | None:
        """Take the next turn; None: there is none.

        Raises:
            RuntimeError: it failed.
        """
        turn = self.session.next_turn()
        if turn is None:
            return None
        data = orjson.dumps(body_of(self.api, turn.body))
        headers = {"Content-Type": "application/json"}
        try:
            async with client.post(PATHS[self.api], data=data, headers=headers) as answer:
                answered = await answer.read()
                if answer.status != 200:
                    raise ValueError(f"{answer.status}: {answered[:300].decode(errors='replace')}")
            reported = read(self.api, answered.splitlines())
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise RuntimeError(f"{self.api}, session {turn.session_id}: {exc!r}") from exc
        self.session.advance(reported.text)
        predicted = parse_predicted(answer.headers.get("x-warmroute-cached"))
        taken = ApiTurn(
            api=self.api,
            session_id=turn.session_id,
            number=turn.number,
            replica=answer.headers.get("x-warmroute-replica"),
            predicted=None if predicted is None else predicted.total,
            num_prompt_tokens=reported.num_prompt_tokens,
            num_cached_tokens=reported.num_cached_tokens,
            num_left_tokens=self.num_left_tokens,
        )
        self.num_left_tokens = reported.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
        return taken


async def take_turns(
    url: str, num_turns: int, profile: Profile, on_turn: Callable[[ApiTurn], None]
) -> None:
    """Take so many turns by each API, or a few more: sessions are played to their ends.

    Raises:
        RuntimeError: a turn failed.
    """
    num_taken = dict.fromkeys(APIS, 0)
    seed = 0
    async with make_client(base_url=url, timeout_s=_SILENCE_S) as client:
        while min(num_taken.values()) < num_turns:
            running = _conversations(profile, seed)
            seed += 1
            while running:
                for conversation in list(running):
                    taken = await conversation.take(client)
                    if taken is None:
                        running.remove(conversation)
                        continue
                    num_taken[taken.api] += 1
                    on_turn(taken)
                    await asyncio.sleep(SETTLE_S)


def _conversations(profile: Profile, seed: int) -> list[_Conversation]:
    """Draw the sessions that run at once: calm and wild ones by each API, of one preamble each."""
    made = []
    for kind, fields in (("calm", {}), ("wild", _WILD)):
        num = len(APIS) * NUM_AT_ONCE // 2
        sessions = make_sessions(replace(profile, seed=seed, num_sessions=num, extra_body=fields))
        for index, session in enumerate(sessions):
            session.id = f"{seed}-{kind}-{session.id}"
            made.append(_Conversation(APIS[index % len(APIS)], session))
    return made


def report(turns: Sequence[ApiTurn]) -> str:
    """Lay the turns out by API, and each wrong prediction."""
    rows = []
    for api in (*APIS, None):
        ours = [turn for turn in turns if api in (turn.api, None)]
        if not ours:
            continue
        num_right = sum(turn.is_right for turn in ours)
        rows.append(
            [
                f"`{PATHS[api]}`" if api else "all",
                f"{len(ours):,}",
                f"{sum(turn.num_prompt_tokens for turn in ours):,}",
                f"{sum(turn.num_cached_tokens for turn in ours):,}",
                f"{sum(turn.num_cached_tokens < turn.num_left_tokens for turn in ours):,}",
                f"{num_right:,}",
                f"{num_right / len(ours):.1%}",
            ]
        )
    header = [
        "API", "turns", "prompt tokens", "cached", "turns after an eviction",
        "predicted = reported", "share",
    ]  # fmt: skip
    wrong = [
        f"- {turn.api}, session {turn.session_id}, turn {turn.number} on {turn.replica}: predicted "
        f"{turn.predicted}, reported {turn.num_cached_tokens} of {turn.num_prompt_tokens}"
        for turn in turns
        if not turn.is_right
    ]
    return "\n".join([table(header, rows), *([""] if wrong else []), *wrong])


@asynccontextmanager
async def _router(url: str | None, folder: Path) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    engines = [Engine(name, folder) for name in ("r1", "r2")]
    with all_up(engines):
        async with start_router([engine.url for engine in engines], (), folder) as router:
            yield router.url


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its table; after Ctrl-C that of what is done."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.studies.apis", description=(__doc__ or "").split("\n")[0]
    )
    asked.add_argument(
        "--turns", type=int, default=NUM_TURNS, help=f"by each API; default: {NUM_TURNS}"
    )
    asked.add_argument("--router", metavar="URL", help="in front of other engines; none is started")
    args = asked.parse_args(argv)
    if args.turns < 1:
        asked.error(f"--turns {args.turns}: must be 1 or more")
    turns: list[ApiTurn] = []

    def measure(progress: Progress) -> None:
        interrupt_on_sigterm()
        task = progress.add_task("engines start", total=len(APIS) * args.turns)

        def found(turn: ApiTurn) -> None:
            turns.append(turn)
            progress.update(task, advance=1, description=turn.session_id)

        async def run() -> None:
            with tempfile.TemporaryDirectory(prefix="apis-") as folder:
                async with _router(args.router, Path(folder)) as url:
                    await take_turns(url, args.turns, PROFILE, found)

        asyncio.run(run())

    code = measured(measure, Console(stderr=True))
    if turns:
        print(report(turns))
    return code


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
