"""What the demo runs, and why these numbers. None was chosen by which policy it favours: sizes
and speed by what two cores do in two minutes, caches by the rule below.

The replicas stand for three servers of four H100 with Llama 3.1 70B each (the emulator's preset
`h100x4-70b`, from data sheets). To fit two cores and two minutes, two things are scaled:

    tokens 4:1   One emulated token stands for four, in the prompts, in the replies, in the caches
                 and in the cost of computing it. Text is a quarter as long, and a step costs what
                 the step over the full text would: linear terms x 4, (token, context) pairs x 16.
    clock 25:1   Steps, tool waits and ramp take a twenty-fifth of their time. What is not scaled
                 (router, driver, sockets: real milliseconds) weighs 25 times as much as it would
                 in front of GPUs.

Sessions are `loadtest.agents` after 610 Codex traces, with fewer turns (median 8, not 30; spread
0.4, not 0.5: one straggler would double the run) and quicker tools (median wait 2.6 s, not 5.2).
A few sessions are still much longer than most. All share one system prompt and its tools; 44 %
start three sub-agents at once, from their own context, with session ids of their own.

The caches follow from the sessions: all replicas together hold half of what the agents ever write.
Undivided, that is nearly as good as an unlimited cache (92.8 % hits against 93.5 %, 36 sessions
of 12 turns on one replica three times as large and fast). Divided by three it is not: a policy that
keeps copies on several replicas, or fills one and leaves another, evicts what is needed again.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.agents import Profile, Session, make_sessions

TOKENS_PER_TOKEN: Final = 4
SPEED: Final = 25.0
NUM_REPLICAS: Final = 3
BLOCK_SIZE: Final = 16  # emulated tokens; 64 real ones
CACHE_RATIO: Final = 0.5  # all caches : what the agents write, each text once
SESSION_HEADER: Final = "x-session-id"

_CHARS_PER_TOKEN: Final = 3.9  # of loadtest.agent_text's sources
_MARKUP_TOKENS: Final = 30  # a message's role, and a tool call's JSON
_ROOM: Final = 1.5  # even alone, the longest session fits its replica

# Preset h100x4-70b of loadtest.emulator.time_model, for tokens that stand for four: a step of
# 1 emulated token is 4 decode steps (base x 4), reads 4 x the context 4 times (x 16).
_BASE_MS: Final = 13.0
_MS_PER_PREFILL_TOKEN: Final = 0.071
_MS_PER_MTOKEN2: Final = 1.7
_MS_PER_DECODE: Final = 0.04
_MS_PER_MTOKEN_CONTEXT: Final = 31.0


class Workload(Struct, frozen=True, kw_only=True):
    """One size of the demo."""

    name: str
    num_sessions: int
    num_turns: int  # median
    seed: int = 1
    speed: float = SPEED

    def profile(self) -> Profile:
        """Return what the sessions look like."""
        return Profile(
            num_sessions=self.num_sessions,
            num_turns=self.num_turns,
            scale_tokens=1 / TOKENS_PER_TOKEN,
            scale_time=1 / self.speed,
            turns_sigma=0.4,
            tool_wait_s=2.6,
            ramp_s=60.0,
            seed=self.seed,
            extra_body={"ignore_eos": True},  # replies as long as drawn, not as the emulator likes
        )

    def sessions(self) -> list[Session]:
        """Build the sessions anew: same seed, same sessions."""
        return make_sessions(self.profile())

    def replica_flags(self, num_gpu_blocks: int) -> list[str]:
        """Write the options of `warmroute emulate` for one replica.

        The same seed on all: the same prompt gets the same reply wherever it goes, so every
        policy sees the same conversations.
        """
        n = TOKENS_PER_TOKEN
        options = {
            "block-size": BLOCK_SIZE,
            "num-gpu-blocks": num_gpu_blocks,
            "max-num-batched-tokens": 8192 // n,
            "base-ms": _BASE_MS * n,
            "ms-per-prefill-token": _MS_PER_PREFILL_TOKEN * n,
            "ms-per-mtoken2": _MS_PER_MTOKEN2 * n * n,
            "ms-per-decode": _MS_PER_DECODE * n,
            "ms-per-mtoken-context": _MS_PER_MTOKEN_CONTEXT * n * n,
            "speed": self.speed,
            "tick-ms": 5.0,  # a first token is at most this late; fewer wake-ups
            "seed": self.seed,
        }
        return [part for name, value in options.items() for part in (f"--{name}", str(value))]


FULL: Final = Workload(name="full", num_sessions=32, num_turns=8)
SHORT: Final = replace(FULL, name="short", num_sessions=14, num_turns=4, speed=50.0)  # for CI


class Plan(Struct, frozen=True, kw_only=True):
    """What a workload comes to, known beforehand.

    Turns are exact; tokens are emulated ones, estimated within some 10 %. `num_gpu_blocks` is a
    replica's cache, the null block among them.
    """

    num_turns: int
    num_sub_agents: int
    longest_turns: int  # of one session
    longest_tokens: int  # context of one session
    written_tokens: int  # all contexts at their ends, what they share counted once
    num_gpu_blocks: int

    @property
    def cache_tokens(self) -> int:
        """Count the tokens that one replica can hold."""
        return (self.num_gpu_blocks - 1) * BLOCK_SIZE


def plan(workload: Workload) -> Plan:
    """Play the sessions without an engine, count, and size the caches."""
    profile = workload.profile()
    num_shared_tokens = profile.tokens(profile.num_shared_tokens)
    queue = workload.sessions()
    num_turns = longest_turns = longest_tokens = 0
    written_tokens = num_shared_tokens
    for number, session in enumerate(queue):  # grows as sub-agents join
        contexts: list[int] = []
        while (turn := session.next_turn()) is not None:
            messages = turn.body["messages"][1:]  # after the shared system prompt
            chars = sum(len(message["content"] or "") for message in messages)
            contexts.append(round(chars / _CHARS_PER_TOKEN) + _MARKUP_TOKENS * len(messages))
            queue.extend(session.advance(None))
        num_turns += len(contexts)
        longest_turns = max(longest_turns, len(contexts))
        longest_tokens = max(longest_tokens, num_shared_tokens + contexts[-1])
        is_sub_agent = number >= workload.num_sessions
        written_tokens += contexts[-1] - (contexts[0] if is_sub_agent else 0)
    cache_tokens = max(CACHE_RATIO * written_tokens / NUM_REPLICAS, _ROOM * longest_tokens)
    return Plan(
        num_turns=num_turns,
        num_sub_agents=len(queue) - workload.num_sessions,
        longest_turns=longest_turns,
        longest_tokens=longest_tokens,
        written_tokens=written_tokens,
        num_gpu_blocks=round(cache_tokens / BLOCK_SIZE) + 1,
    )
