"""Coding agents as block ids: the sessions of `loadtest.agents` without their text.

Every turn's prompt is the one before, its reply, and what a tool said (or the user, at first).
Sub-agents start from their parent's context; their reports are its next tool results.

With `num_live` the number of sessions under way is constant: a new one comes after each that ends.
This is part of the turns (`after`), so every driver keeps it in its closed loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from loadtest.agents import (
    MARKUP_TOKENS,
    Pause,
    Profile,
    TurnPlan,
    plan_fork,
    plan_session,
)
from loadtest.generated.prefix import Prefix
from loadtest.generated.script import Done, Script
from loadtest.timing import poisson
from loadtest.workload import Workload

Pauses = Literal["tools", "short"]

_PAUSES: Final[dict[Pauses, tuple[Pause, ...]]] = {
    "tools": (),  # of the profile: 5.2 s, P99 81 s
    "short": (
        Pause(share=0.8, median_s=0.22, sigma=1.0),
        Pause(share=0.2, median_s=9.8, sigma=0.6),
    ),
}
"""Short: 0.3 s in the median and 9.8 s at P90, as 203 recorded sessions of Claude Code.
Source: zetxqx/thunderagent-original-verification, recorded turns."""
_SUB_TASK_TOKENS: Final = 40  # of `agent_text.sub_task`, with tiny_model
_RAMP_S: Final = 10.0  # the first of a constant number of sessions start spread over it
_FASTEST: Final = 4.0  # no engine is so much faster than the script's idle one


class Agents(Struct, frozen=True, kw_only=True):
    """Agent sessions; the defaults and their sources are those of `loadtest.agents.Profile`.

    `num_live` sessions are under way at any time for `span_s` seconds; then `num_sessions` and
    `rate` do not count. The first ones begin anywhere in their lives.
    """

    num_sessions: int = 50
    num_turns: int = 30  # median
    rate: float = 1.0  # sessions started per second, a Poisson process; infinite: all at once
    num_live: int | None = None  # sessions at once; None: as they start
    span_s: float = 600.0
    num_shared_tokens: int = 11_500  # system prompt and tools
    num_output_tokens: int = 300  # median
    pauses: Pauses = "tools"
    sub_agent_share: float = 0.44  # of the sessions
    scale_tokens: float = 1.0
    block_size: int = 512
    seed: int = 0

    @property
    def profile(self) -> Profile:
        """Describe the sessions."""
        return Profile(
            num_sessions=self.num_sessions,
            num_turns=self.num_turns,
            num_shared_tokens=self.num_shared_tokens,
            num_output_tokens=self.num_output_tokens,
            pauses=_PAUSES[self.pauses],
            sub_agent_share=self.sub_agent_share,
            scale_tokens=self.scale_tokens,
            seed=self.seed,
        )

    def workload(self) -> Workload:
        """Generate it: same parameters, same workload."""
        if self.num_live is not None:
            script = Script(self.block_size)
            live_sessions(script, self.profile, self.num_live, self.span_s)
            name = f"agents, {self.num_live} live sessions, seed {self.seed}"
        else:
            starts = poisson(self.rate, random.Random(f"{self.seed}/starts"))
            script = agent_sessions(self.profile, self.block_size, starts)
            name = f"agents, {self.num_sessions} sessions, seed {self.seed}"
        return script.workload(name)


def agent_sessions(profile: Profile, block_size: int, starts: Iterator[float]) -> Script:
    """Write down the sessions that `profile` draws, each starting at one of `starts`."""
    script = Script(block_size)
    shared = Prefix(block_size).grow(profile.tokens(profile.num_shared_tokens))
    for index in range(profile.num_sessions):
        _Session(script, profile, f"s{index}", shared.fork()).play(
            plan_session(profile, index), next(starts), shared.num_tokens if index else 0
        )
    return script


def live_sessions(script: Script, profile: Profile, num_live: int, span_s: float) -> None:
    """Write down a constant number of sessions, enough for `span_s` seconds on any engine.

    The first session of each lane begins at some turn of its life, with its context, so that the
    contexts are as mixed at the beginning as they are later.
    """
    shared = Prefix(script.block_size).grow(profile.tokens(profile.num_shared_tokens))
    dice = random.Random(f"{profile.seed}/lives")
    index = 0
    for lane in range(num_live):
        done: Done | None = None
        start_s = _RAMP_S * lane / num_live
        while done is None or done.at_s - start_s < _FASTEST * span_s:
            plans = plan_session(profile, index)
            session = _Session(script, profile, f"s{index}", shared.fork())
            if done is None:
                num_past = dice.randrange(len(plans))
                done = session.go_on_from(plans, num_past, start_s)
            else:
                first = replace(plans[0], wait_s=0.0)
                done = session.play((first, *plans[1:]), None, shared.num_tokens, after=done)
            index += 1


def mean_context_tokens(profile: Profile, num_sessions: int = 50) -> float:
    """Return the mean of a session's own tokens over its turns, without the shared ones."""
    contexts: list[int] = []
    for index in range(num_sessions):
        num_tokens = 0
        for plan in plan_session(profile, index):
            num_tokens += plan.num_input_tokens + plan.num_output_tokens + MARKUP_TOKENS
            contexts.append(num_tokens)
    return sum(contexts) / len(contexts)


class _Session:
    """One agent at work."""

    __slots__ = ("_id", "_prefix", "_profile", "_script")

    def __init__(self, script: Script, profile: Profile, session_id: str, prefix: Prefix) -> None:
        self._script = script
        self._profile = profile
        self._id = session_id
        self._prefix = prefix

    def play(
        self,
        plans: tuple[TurnPlan, ...],
        start_s: float | None,
        num_known_tokens: int,
        after: Done | None = None,
    ) -> Done:
        """Play a session that starts by itself, or after another one; return its last turn."""
        before = () if after is None else (after,)
        done = self._say(plans[0], before, num_known_tokens, start_s)
        return self._go_on(plans, done)

    def go_on_from(self, plans: tuple[TurnPlan, ...], num_past: int, start_s: float) -> Done:
        """Play a session whose first turns were before the workload's start."""
        for plan in plans[:num_past]:
            self._prefix.grow(plan.num_input_tokens + MARKUP_TOKENS + plan.num_output_tokens)
        return self.play(plans[num_past:], start_s, 0)

    def play_fork(self, plans: tuple[TurnPlan, ...], parent: Done) -> Done:
        """Play a sub-agent, which has its parent's context and a task; return its last turn."""
        task = replace(plans[0], num_input_tokens=_SUB_TASK_TOKENS)
        done = self._say(task, (parent,), parent.num_input_tokens)
        return self._go_on(plans, done)

    def _go_on(self, plans: tuple[TurnPlan, ...], done: Done) -> Done:
        for number, plan in enumerate(plans[1:], 1):
            reports = self._fork(plans[number - 1].num_sub_agents, number, done)
            if reports:  # they are the tool results, and their work was the wait
                num_tokens = sum(report.num_output_tokens for report in reports)
                plan = replace(plan, num_input_tokens=num_tokens, wait_s=0.0)
            done = self._say(plan, reports or (done,), done.num_input_tokens)
        return done

    def _say(
        self,
        plan: TurnPlan,
        after: tuple[Done, ...],
        num_known_tokens: int,
        arrival_s: float | None = None,
    ) -> Done:
        self._prefix.grow(plan.num_input_tokens + MARKUP_TOKENS)
        return self._script.say(
            self._id,
            self._prefix,
            plan.num_output_tokens,
            num_known_tokens=num_known_tokens,
            after=after,
            wait_s=plan.wait_s if after else 0.0,
            arrival_s=arrival_s,
        )

    def _fork(self, num_sub_agents: int, number: int, parent: Done) -> tuple[Done, ...]:
        """Run sub-agents from the context as it is; return their last turns."""
        reports = []
        for k in range(num_sub_agents):
            session_id = f"{self._id}.{number}.{k}"
            rng = random.Random(f"{self._profile.seed}/{session_id}/plan")
            plans = plan_fork(self._profile, rng, self._prefix.num_tokens)
            child = _Session(self._script, self._profile, session_id, self._prefix.fork())
            reports.append(child.play_fork(plans, parent))
        return tuple(reports)
