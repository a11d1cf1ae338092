"""Why real engines computed tokens again: each cause that was planted is named, and nothing else.

Six agents talk to two replicas with small caches. Between their rounds the caches are filled by
others, a replica is restarted, and one drains. One agent has a clock in its system prompt, one
replaces its history by a summary, one sends its tools in another order, one is another's sub-agent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.engines.harness import ENGINE_READY_S, Engine, Router, all_up, wait_until

NUM_BLOCKS: Final = 320  # of 32 tokens: the agents fill both caches in the end
MOST_UNKNOWN: Final = 0.02  # of the tokens that were computed again

SYSTEM: Final = "You are a careful agent. " + "Read the file before you change it. " * 50
TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": name, "description": f"To {name} a file. " * 10, "parameters": {}},
    }
    for name in ("read", "write", "search")
]

Turn = dict[str, Any]


class Agent:
    """A conversation that grows, and what its engines report of each turn."""

    def __init__(self, name: str, *, parent: Agent | None = None) -> None:
        self.name = name
        self.parent = parent
        self.persona = parent.name if parent is not None else name
        self.has_clock = False
        self.tools = TOOLS
        self.messages: list[dict[str, str]] = list(parent.messages) if parent is not None else []
        self.answers: list[tuple[str, int, int]] = []  # request, prompt tokens, cached tokens
        self.home = ""  # the replica of its last turn

    async def goes_on(self, client: httpx.AsyncClient) -> None:
        """Take a turn, and add the answer to the history."""
        number = len(self.answers)
        text = " ".join(f"{self.name} saw {i} in step {number}, as it had to." for i in range(12))
        self.messages.append({"role": "user", "content": text})
        clock = f"It is 12:{number:02}. " if self.has_clock else ""
        system = {"role": "system", "content": f"{SYSTEM}{clock}Your name is {self.persona}."}
        headers = {"X-Session-ID": self.name}
        if self.parent is not None:
            headers["x-parent-session-id"] = self.parent.name
        answer = await client.post(
            "/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [system, *self.messages],
                "tools": self.tools,
                "max_tokens": 8,
            },
            headers=headers,
        )
        assert answer.status_code == 200, answer.text
        said = answer.json()
        usage, request = said["usage"], answer.headers["x-warmroute-request-id"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.answers.append((request, usage["prompt_tokens"], cached))
        self.home = answer.headers["x-warmroute-replica"]
        text = said["choices"][0]["message"]["content"] or "Done."
        self.messages.append({"role": "assistant", "content": text})

    def compacts(self) -> None:
        """Replace the history by a shorter one."""
        self.messages = [{"role": "user", "content": f"{self.name} has read all files so far."}]

    def reads_much(self) -> None:
        """Add half of what a replica's cache holds."""
        text = " ".join(f"{self.name} read line {i} of the file." for i in range(350))
        self.messages.append({"role": "user", "content": text})


class Play:
    """All that happened, and what the router says of it."""

    def __init__(self, router: Router, engines: dict[str, Engine]) -> None:
        self.router = router
        self.engines = engines
        self.plain, self.other, self.clock = Agent("plain"), Agent("other"), Agent("clock")
        self.compacting, self.sorting = Agent("compacting"), Agent("sorting")
        self.clock.has_clock = True
        self.agents = [self.plain, self.other, self.clock, self.compacting, self.sorting]
        self.fillers: list[Agent] = []
        self.planted: dict[str, tuple[Agent, int]] = {}  # cause or part -> whose turn
        self.turns: dict[str, list[Turn]] = {}
        self.findings: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Play it."""
        async with httpx.AsyncClient(base_url=self.router.url, timeout=120) as client:
            for _ in range(3):
                await self.round(client)
            self.compacting.compacts()
            self.sorting.tools = TOOLS[::-1]
            self.plant("compacted", self.compacting)
            self.plant("tool_order", self.sorting)
            await self.round(client)

            await self.fill(client)
            sub = Agent("sub", parent=self.plain)
            self.plant("evicted from its parent", sub)
            await sub.goes_on(client)
            self.agents.append(sub)
            self.plant("evicted", self.other)
            await self.round(client)
            await self.round(client)

            self.plant("cleared", self.plain)
            self.restart(self.plain.home)
            await self.round(client)

            self.plant("moved", self.other)
            origin = self.other.home
            self.router.drain(origin)
            await self.round(client)
            self.router.drain(origin, draining=False)
            await self.round(client)
        self.plant("system", self.clock, number=2)
        self.read()

    async def round(self, client: httpx.AsyncClient) -> None:
        """Let all agents take a turn at once."""
        await asyncio.gather(*(agent.goes_on(client) for agent in self.agents))

    def plant(self, what: str, agent: Agent, number: int | None = None) -> None:
        """Say what the next turn of an agent is to show, or another one."""
        self.planted[what] = agent, len(agent.answers) if number is None else number

    async def fill(self, client: httpx.AsyncClient) -> None:
        """Have other conversations take all of both caches."""
        for name in self.engines:
            (drained,) = self.engines.keys() - {name}
            self.router.drain(drained)
            for number in range(2):
                filler = Agent(f"filler-{number}-{name}")
                filler.reads_much()
                await filler.goes_on(client)
                self.fillers.append(filler)
            self.router.drain(drained, draining=False)

    def restart(self, name: str) -> None:
        """Kill a replica, and start it again at the same address."""
        router, engine = self.router, self.engines[name]

        def is_up() -> bool:
            return router.metric("warmroute_replica_healthy", replica=name) == 1

        engine.kill()
        wait_until(lambda: not is_up(), 60, "the router to see a dead replica")
        engine.start()
        engine.wait_ready("/health", ENGINE_READY_S)
        # Blind: the new process has published nothing yet.
        wait_until(lambda: is_up() and router.state(name) == "blind", 60, "the router to see it")

    def read(self) -> None:
        """Read all turns, once every one is booked."""
        admin = f"{self.router.admin_url}/admin"
        for agent in (*self.agents, *self.fillers):

            def booked(agent: Agent = agent) -> bool:
                found = httpx.get(f"{admin}/sessions/{agent.name}", timeout=30).json()
                self.turns[agent.name] = found["turns_shown"]
                return len(found["turns_shown"]) == len(agent.answers)

            wait_until(booked, 30, "every turn to be booked")
        self.findings = httpx.get(f"{admin}/findings", timeout=30).json()["findings"]

    def of(self, what: str) -> Turn:
        """Return the turn that something was planted in."""
        agent, number = self.planted[what]
        return self.turns[agent.name][number]

    def causes(self) -> Counter[str]:
        """Add up the tokens of all turns by cause."""
        total: Counter[str] = Counter()
        for turns in self.turns.values():
            for turn in turns:
                total.update(turn["computed"]["tokens"])
        return total

    def table(self) -> str:
        """Write each turn's causes in a line."""
        planted = {(agent.name, number): what for what, (agent, number) in self.planted.items()}
        lines = [f"{'turn':<20} {'at':<3} {'prompt':>6} {'cached':>6}  causes"]
        for name, turns in self.turns.items():
            for number, turn in enumerate(turns):
                causes = ", ".join(f"{k} {v:,}" for k, v in turn["computed"]["tokens"].items())
                note = f"  <- {planted[name, number]}" if (name, number) in planted else ""
                lines.append(
                    f"{name + ' ' + str(number):<20} {turn['candidate']:<3}"
                    f" {turn['num_tokens']:>6,} {turn['num_cached']:>6,}  {causes}{note}"
                )
        lines.append(f"all: {dict(self.causes())}")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def play(log_dir: Path) -> Iterator[Play]:
    """Two replicas with small caches, a router, and six agents."""
    engines = [
        Engine(f"ledger-{number}", log_dir, num_blocks=NUM_BLOCKS, max_model_len=8_192)
        for number in (1, 2)
    ]
    with all_up(engines), Router(engines, log_dir) as router:
        played = Play(router, dict(zip(("r1", "r2"), engines, strict=True)))
        asyncio.run(played.run())
        print(f"\n{played.table()}")
        yield played


def test_the_causes_add_up_to_the_engines_own_count(play: Play) -> None:
    """In every turn of every conversation, and in the metric."""
    num_cached = 0
    for agent in (*play.agents, *play.fillers):
        turns = {turn["request_id"]: turn for turn in play.turns[agent.name]}
        for request, prompt_tokens, cached_tokens in agent.answers:
            causes = turns[request]["computed"]["tokens"]
            assert sum(causes.values()) == prompt_tokens - cached_tokens, (agent.name, causes)
            num_cached += cached_tokens

    metric = play.router.metric
    assert metric("warmroute_prompt_tokens_total", cause="cached") == num_cached
    for cause, num_tokens in play.causes().items():
        assert metric("warmroute_prompt_tokens_total", cause=cause) == num_tokens


@pytest.mark.parametrize("what", ["system", "compacted", "tool_order"])
def test_a_changed_prompt_is_named_by_its_part(play: Play, what: str) -> None:
    turn = play.of(what)
    tokens, change = turn["computed"]["tokens"], turn["computed"]["change"]

    assert change["part"] == what
    assert 0 < change["offset"] < turn["num_tokens"]
    assert tokens["changed"] > 150
    assert "last_block" not in tokens


@pytest.mark.parametrize("cause", ["evicted", "cleared", "moved"])
def test_what_became_of_the_cache_is_named(play: Play, cause: str) -> None:
    """It is the cause of everything that the turn before had, in whole blocks."""
    agent, number = play.planted[cause]
    before, turn = play.turns[agent.name][number - 1 : number + 1]
    tokens = turn["computed"]["tokens"]

    assert tokens[cause] > 0.9 * (before["num_tokens"] - turn["num_cached"])
    assert set(tokens) <= {cause, "last_block", "new"}
    found = turn["computed"]["move" if cause == "moved" else "loss"]
    assert found["origin" if cause == "moved" else "replica"] == before["candidate"]


def test_what_a_sub_agent_has_of_its_parent_is_not_new(play: Play) -> None:
    agent, number = play.planted["evicted from its parent"]
    above = play.turns["plain"][3]
    turn = play.turns[agent.name][number]
    tokens = turn["computed"]["tokens"]

    assert tokens["evicted"] > 0.9 * (above["num_tokens"] - turn["num_cached"])
    assert set(tokens) <= {"evicted", "last_block", "new"}


def test_the_clock_is_found_by_itself(play: Play) -> None:
    hints = {finding["part"]: finding["hint"] for finding in play.findings}

    assert hints["system"] == "time"


def test_hardly_anything_is_unknown(play: Play) -> None:
    causes = play.causes()
    num_again = causes.total() - causes["new"]

    assert num_again > 20_000
    assert causes["unknown"] < MOST_UNKNOWN * num_again
