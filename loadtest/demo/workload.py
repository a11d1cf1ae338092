"""What the demo runs, and why these numbers. None was chosen by which policy it favours: sizes
by what two cores do in half a minute, caches by the rule below.

The replicas stand for three servers of four H100 with Llama 3.1 70B each (the emulator's preset
`h100x4-70b`, from data sheets). One emulated token stands for four: in the prompts, in the replies,
in the caches and in the cost of computing it. Text is a quarter as long, and a step costs what the
step over the full text would: linear terms x 4, (token, context) pairs x 16. Seconds are those of
the full text: a first token that takes 0.6 s here takes 0.6 s there.

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
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS, TimeModel

TOKENS_PER_TOKEN: Final = 4
NUM_REPLICAS: Final = 3
BLOCK_SIZE: Final = 16  # emulated tokens; 64 real ones
CACHE_RATIO: Final = 0.5  # all caches : what the agents write, each text once
SESSION_HEADER: Final = "x-session-id"

_CHARS_PER_TOKEN: Final = 3.9  # of loadtest.agent_text's sources
_MARKUP_TOKENS: Final = 30  # a message's role, and a tool call's JSON
_ROOM: Final = 1.5  # even alone, the longest session fits its replica

# For tokens that stand for four: a step of 1 emulated token is 4 decode steps (base x 4), reads
# 4 x the context 4 times (x 16).
_PRESET: Final = PRESETS["h100x4-70b"]
_TIMES: Final = TimeModel(
    base_ms=_PRESET.base_ms * TOKENS_PER_TOKEN,
    ms_per_prefill_token=_PRESET.ms_per_prefill_token * TOKENS_PER_TOKEN,
    ms_per_mtoken2=_PRESET.ms_per_mtoken2 * TOKENS_PER_TOKEN**2,
    ms_per_decode=_PRESET.ms_per_decode * TOKENS_PER_TOKEN,
    ms_per_mtoken_context=_PRESET.ms_per_mtoken_context * TOKENS_PER_TOKEN**2,
)
_TICK_MS: Final = 100.0  # a first token is at most this late; fewer wake-ups


class Workload(Struct, frozen=True, kw_only=True):
    """One size of the demo."""

    name: str
    num_sessions: int
    num_turns: int  # median
    seed: int = 1

    def profile(self) -> Profile:
        """Return what the sessions look like."""
        return Profile(
            num_sessions=self.num_sessions,
            num_turns=self.num_turns,
            scale_tokens=1 / TOKENS_PER_TOKEN,
            turns_sigma=0.4,
            tool_wait_s=2.6,
            ramp_s=60.0,
            seed=self.seed,
            extra_body={"ignore_eos": True},  # replies as long as drawn, not as the emulator likes
        )

    def sessions(self) -> list[Session]:
        """Build the sessions anew: same seed, same sessions."""
        return make_sessions(self.profile())

    def replica_options(self, num_gpu_blocks: int) -> EmulatorOptions:
        """Describe one replica.

        The same seed on all: the same prompt gets the same reply wherever it goes, so every
        policy sees the same conversations.
        """
        return EmulatorOptions(
            block_size=BLOCK_SIZE,
            num_gpu_blocks=num_gpu_blocks,
            max_num_batched_tokens=8192 // TOKENS_PER_TOKEN,
            time_model=_TIMES,
            tick_ms=_TICK_MS,
            seed=self.seed,
        )


FULL: Final = Workload(name="full", num_sessions=24, num_turns=8)
SHORT: Final = replace(FULL, name="short", num_sessions=14, num_turns=4)  # for CI


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
