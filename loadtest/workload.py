"""A workload: the turns to send, when, after what, and which of their tokens repeat.

Trace readers and generators make it; the live replay and the simulator read it. Formats, random
draws, sending and clocks do not belong here.

Prompts are given as ids, not as text: `hash_ids` name prefixes of `block_size` tokens each, as in a
Mooncake trace (equal id = equal block and equal prefix). The last block may be partial. The text is
made when a turn is sent (`loadtest.text`); equal ids become equal tokens.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

TurnKey = tuple[str, int]
"""Session id and the number of the turn in it, from 0."""


class Turn(Struct, frozen=True, kw_only=True, gc=False):
    """One request of a workload.

    Open loop: sent at `arrival_s`. Closed loop: sent `wait_s` after the last turn in `after` is
    done (a tool ran in between); a turn with nothing in `after` is sent at `arrival_s`. Sub-agents
    are sessions of their own: their first turn comes after their parent's, the parent's next turn
    after their last ones.
    """

    session_id: str
    number: int  # in its session, from 0
    arrival_s: float  # from the start of the workload
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]  # ceil(num_input_tokens / block_size) of them
    after: tuple[TurnKey, ...] = ()
    wait_s: float = 0.0
    messages: tuple[dict[str, Any], ...] | None = None  # a trace that has text: sent as it is
    tools: tuple[dict[str, Any], ...] | None = None  # that go with the messages
    # Live routers are not told of these:

    @property
    def key(self) -> TurnKey:
        """Name the turn."""
        return self.session_id, self.number


class Workload(Struct, frozen=True, kw_only=True):
    """Turns in order of arrival; every key in an `after` is one of an earlier turn.

    `name` says where it comes from, for people (a file's name, a generator and its parameters).
    """

    name: str
    block_size: int  # tokens a hash id stands for
    turns: tuple[Turn, ...]
    num_skipped: int = 0  # bad lines of a trace that were left out

    @property
    def num_input_tokens(self) -> int:
        """Sum the prompts."""
        return sum(turn.num_input_tokens for turn in self.turns)

    @property
    def span_s(self) -> float:
        """Measure from the first arrival to the last."""
        return self.turns[-1].arrival_s - self.turns[0].arrival_s if self.turns else 0.0
