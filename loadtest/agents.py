"""Coding-agent sessions as data: growing conversations with tools, waits and sub-agents.

A session says what the agent sends next, given the reply (closed loop). Sending belongs to
whoever drives them. There is no clock here, and no global random source.

The defaults are the statistics of 610 traces of Codex on SWE-bench Pro (vLLM blog, "Serving
Agentic Workloads at Scale with vLLM x Mooncake", 2026-05-06, and the data set's card):

    turns            mean 33, P50 30, P90 57, P99 90     lognormal(30, 0.5): 34, 30, 57, 96
    first turn       12K tokens, 11.5K of them shared    system prompt and tool definitions
    growth           2,242 tokens a turn on average,     two large results first (6.2K, 5.8K),
                     output included                     then a heavy tail
    output           median ~300, mean 522               lognormal(300, 1.05): 300, 521
    tool wait        median 5.2 s, P99 81.4 s            lognormal(5.2, 1.18): 5.2, 81
    contexts         80K at turn 30, 180K at most        cut there
    sub-agents       in 44 % of sessions                 AgentX traces (vLLM blog, 2026-09-08)
"""

from __future__ import annotations

import math
import random
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest import agent_text

MARKUP_TOKENS: Final = 60  # what the template and a tool call's JSON add to a turn
_NUM_LARGE_RESULTS: Final = 2  # an agent first reads files


class Pause(Struct, frozen=True, kw_only=True, gc=False):
    """One kind of wait between an answer and the next turn, and its share of the waits."""

    share: float
    median_s: float
    sigma: float


class Profile(Struct, frozen=True, kw_only=True):
    """What the sessions look like.

    Token counts and seconds are unscaled; `scale_tokens` and `scale_time` apply to all of them.
    `salts` are dealt out to the sessions in turn (None: no `cache_salt`). `extra_body` goes into
    every request, for what an engine understands beyond OpenAI's API (`ignore_eos`).
    """

    num_sessions: int = 50
    num_turns: int = 30  # median
    turns_sigma: float = 0.5  # 0: every session has num_turns
    scale_tokens: float = 1.0
    scale_time: float = 1.0
    seed: int = 0
    model: str = "tiny"
    num_shared_tokens: int = 11_500
    num_task_tokens: int = 500
    num_large_result_tokens: int = 5_600  # median of the first two results
    num_result_tokens: int = 870  # median of the others
    result_sigma: float = 1.0
    max_result_tokens: int = 10_000  # where agents truncate what a tool says
    num_output_tokens: int = 300  # median
    output_sigma: float = 1.05
    max_output_tokens: int = 4_096
    max_context_tokens: int = 180_000  # of the conversation, by this module's estimate
    tool_wait_s: float = 5.2  # median
    tool_wait_sigma: float = 1.18
    pauses: tuple[Pause, ...] = ()  # if given, waits are drawn from these kinds instead
    ramp_s: float = 30.0  # sessions start evenly spread over it
    sub_agent_share: float = 0.44  # of the sessions
    num_sub_agents: int = 3  # at once
    num_sub_agent_turns: int = 6  # median
    salts: tuple[str | None, ...] = (None,)
    extra_body: dict[str, Any] = {}

    def tokens(self, num_tokens: float) -> int:
        """Scale a token count; at least 1."""
        return max(1, round(num_tokens * self.scale_tokens))


class TurnPlan(Struct, frozen=True, kw_only=True, gc=False):
    """One turn as drawn beforehand, scaled.

    `num_input_tokens` is the new user or tool text; `wait_s` passes before the turn is sent;
    `num_sub_agents` start from its reply.
    """

    num_input_tokens: int
    num_output_tokens: int
    wait_s: float
    num_sub_agents: int = 0


class Turn(Struct, frozen=True, kw_only=True):
    """One request to send: `body` is an OpenAI chat completion request, without `stream`."""

    session_id: str
    number: int  # from 0
    wait_s: float
    body: dict[str, Any]


class Session:
    """One agent's conversation. Ask `next_turn`, send it, then `advance` with the reply.

    The text of a turn depends only on the profile's seed, the session and the turn's number. Two
    policies therefore get the same conversation, except for the model's replies.
    """

    __slots__ = ("_calls", "_messages", "_plans", "_profile", "_salt", "_sub_agents", "_tools",
                 "id", "num_turns_done", "report")  # fmt: skip

    def __init__(
        self,
        profile: Profile,
        session_id: str,
        plans: tuple[TurnPlan, ...],
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        salt: str | None,
    ) -> None:
        self.id = session_id
        self.num_turns_done = 0
        self.report = ""  # what the last reply said: a parent reads its sub-agents' there
        self._profile = profile
        self._plans = plans
        self._messages = messages
        self._tools = tools
        self._salt = salt
        self._calls: list[dict[str, Any]] = []  # of the last reply, not yet answered
        self._sub_agents: list[Session] = []  # that answer the last calls

    @property
    def num_turns(self) -> int:
        """Count the turns this session will have."""
        return len(self._plans)

    def next_turn(self) -> Turn | None:
        """Build the next request, None after the last turn. Call `advance` before the next."""
        number = self.num_turns_done
        if number == len(self._plans):
            return None
        plan = self._plans[number]
        wait_s = 0.0 if self._sub_agents else plan.wait_s  # their work was the wait
        self._messages.extend(self._inputs(plan, self._rng(number, "input")))
        body: dict[str, Any] = {
            "model": self._profile.model,
            "messages": list(self._messages),
            "tools": self._tools,
            "max_tokens": plan.num_output_tokens,
            "temperature": 0,
            **self._profile.extra_body,
        }
        if self._salt is not None:
            body["cache_salt"] = self._salt
        return Turn(session_id=self.id, number=number, wait_s=wait_s, body=body)

    def advance(self, reply: str | None) -> list[Session]:
        """Add the model's reply and call tools; return the sub-agents to run before going on.

        None stands for a scripted reply: the conversation is then the same on every engine.
        """
        number = self.num_turns_done
        plan = self._plans[number]
        if reply is None:
            reply = agent_text.code(self._rng(number, "reply"), plan.num_output_tokens)
        self.report = reply
        self.num_turns_done = number + 1
        self._sub_agents = [
            self._fork(k, reply, self._rng(number, f"fork {k}")) for k in range(plan.num_sub_agents)
        ]
        self._calls = self._call_tools(number, self._rng(number, "calls"))
        self._messages.append(
            {"role": "assistant", "content": reply or None, "tool_calls": self._calls}
        )
        return list(self._sub_agents)

    def _rng(self, number: int, purpose: str) -> random.Random:
        return random.Random(f"{self._profile.seed}/{self.id}/{number}/{purpose}")

    def _inputs(self, plan: TurnPlan, rng: random.Random) -> list[dict[str, Any]]:
        """Write the task (first turn), or the answers to the last reply's calls."""
        if not self._calls:
            if self.num_turns_done == 0 and self._messages[-1]["role"] == "user":
                return []  # a fork has its task already
            return [{"role": "user", "content": agent_text.task(rng, plan.num_input_tokens)}]
        share = max(1, plan.num_input_tokens // len(self._calls))
        reports = [child.report for child in self._sub_agents]
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": reports[k] if k < len(reports) else agent_text.code(rng, share),
            }
            for k, call in enumerate(self._calls)
        ]

    def _call_tools(self, number: int, rng: random.Random) -> list[dict[str, Any]]:
        """Call one tool, or two at once; with sub-agents, one `task` for each of them."""
        if self._sub_agents:
            names = ["task"] * len(self._sub_agents)
        else:
            offered = [tool["function"]["name"] for tool in self._tools]
            names = rng.choices(offered, k=1 if rng.random() < 0.7 else 2)
        return [
            agent_text.tool_call(rng, name, number, f"call_{self.id}_{number}_{k}")
            for k, name in enumerate(names)
        ]

    def _fork(self, k: int, reply: str, rng: random.Random) -> Session:
        """Start a sub-agent from this very context; its siblings start from it too."""
        messages = [
            *self._messages,
            {"role": "assistant", "content": reply},
            {"role": "user", "content": agent_text.sub_task(rng, k)},
        ]
        num_context_tokens = self._profile.tokens(self._profile.num_shared_tokens) + sum(
            plan.num_input_tokens + plan.num_output_tokens + MARKUP_TOKENS
            for plan in self._plans[: self.num_turns_done]
        )
        plans = plan_fork(self._profile, rng, num_context_tokens)
        session_id = f"{self.id}.{self.num_turns_done}.{k}"
        return Session(self._profile, session_id, plans, messages, self._tools, self._salt)


def make_sessions(profile: Profile) -> list[Session]:
    """Build the profile's sessions, each at its first turn; sub-agents come as they start."""
    num_shared_tokens = profile.tokens(profile.num_shared_tokens)
    system, tools = agent_text.preamble(num_shared_tokens, variant=str(profile.seed))
    return [
        Session(
            profile,
            f"s{index}",
            plan_session(profile, index),
            [{"role": "system", "content": system}],
            tools,
            profile.salts[index % len(profile.salts)],
        )
        for index in range(profile.num_sessions)
    ]


def draw_plans(
    profile: Profile, rng: random.Random, num_turns: int, num_context_tokens: int
) -> tuple[TurnPlan, ...]:
    """Draw 1 to `num_turns` turns behind `num_context_tokens`, cut at the context limit."""
    plans: list[TurnPlan] = []
    for number in range(num_turns):
        median_s, sigma = _draw_pause(profile, rng)
        plan = TurnPlan(
            num_input_tokens=profile.tokens(_draw_input(profile, rng, number)),
            num_output_tokens=profile.tokens(
                min(
                    lognormal(rng, profile.num_output_tokens, profile.output_sigma),
                    profile.max_output_tokens,
                )
            ),
            wait_s=lognormal(rng, median_s, sigma) * profile.scale_time,
        )
        num_context_tokens += plan.num_input_tokens + plan.num_output_tokens + MARKUP_TOKENS
        if plans and num_context_tokens > profile.tokens(profile.max_context_tokens):
            break
        plans.append(plan)
    return tuple(plans)


def plan_session(profile: Profile, index: int) -> tuple[TurnPlan, ...]:
    """Draw a session's turns, its start, and where it starts sub-agents (not on the last turn)."""
    rng = random.Random(f"{profile.seed}/s{index}/plan")
    num_turns = max(2, round(lognormal(rng, profile.num_turns, profile.turns_sigma)))
    plans = list(draw_plans(profile, rng, num_turns, profile.tokens(profile.num_shared_tokens)))
    start_s = profile.ramp_s * profile.scale_time * index / max(1, profile.num_sessions)
    plans[0] = replace(plans[0], wait_s=start_s)
    if rng.random() < profile.sub_agent_share and len(plans) > 1:
        at = rng.randrange(len(plans) - 1)
        plans[at] = replace(plans[at], num_sub_agents=profile.num_sub_agents)
    return tuple(plans)


def plan_fork(
    profile: Profile, rng: random.Random, num_context_tokens: int
) -> tuple[TurnPlan, ...]:
    """Draw a sub-agent's turns behind its parent's context; the first one starts at once."""
    num_turns = lognormal(rng, profile.num_sub_agent_turns, 0.5)
    plans = draw_plans(profile, rng, max(1, round(num_turns)), num_context_tokens)
    return (replace(plans[0], wait_s=0.0), *plans[1:])


def _draw_pause(profile: Profile, rng: random.Random) -> tuple[float, float]:
    """Draw the kind of a wait; return its median and sigma."""
    if not profile.pauses:
        return profile.tool_wait_s, profile.tool_wait_sigma
    drawn = rng.choices(profile.pauses, [pause.share for pause in profile.pauses])[0]
    return drawn.median_s, drawn.sigma


def _draw_input(profile: Profile, rng: random.Random, number: int) -> float:
    if number == 0:
        return profile.num_task_tokens
    if number <= _NUM_LARGE_RESULTS:
        drawn = lognormal(rng, profile.num_large_result_tokens, 0.4)
    else:
        drawn = lognormal(rng, profile.num_result_tokens, profile.result_sigma)
    return min(drawn, profile.max_result_tokens)


def lognormal(rng: random.Random, median: float, sigma: float) -> float:
    """Draw from a lognormal distribution by its median."""
    return median * math.exp(rng.gauss(0.0, sigma))
