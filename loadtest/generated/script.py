"""Where generators write their turns down, with the times an idle engine would give them."""

from __future__ import annotations

from msgspec import Struct

from loadtest.generated.prefix import Prefix
from loadtest.timing import service_s
from loadtest.workload import Turn, TurnKey, Workload


class Done(Struct, frozen=True):
    """A turn that was written down, and when its reply is there."""

    key: TurnKey
    at_s: float
    num_input_tokens: int
    num_output_tokens: int


class Script:
    """Collects turns of any session in any order."""

    __slots__ = ("_numbers", "_turns", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._turns: list[Turn] = []
        self._numbers: dict[str, int] = {}

    def say(
        self,
        session_id: str,
        prefix: Prefix,
        num_output_tokens: int,
        *,
        num_known_tokens: int,
        after: tuple[Done, ...] = (),
        wait_s: float = 0.0,
        arrival_s: float | None = None,
    ) -> Done:
        """Write a session's next turn down: `prefix` is its prompt, which the reply then extends.

        It arrives at `arrival_s`, or else `wait_s` after the last one in `after` is done.
        `num_known_tokens` of the prompt were said before, so that no time is reckoned for them.
        """
        number = self._numbers.get(session_id, 0)
        self._numbers[session_id] = number + 1
        if arrival_s is None:
            arrival_s = max(done.at_s for done in after) + wait_s
        num_input_tokens = prefix.num_tokens
        self._turns.append(
            Turn(
                session_id=session_id,
                number=number,
                arrival_s=arrival_s,
                num_input_tokens=num_input_tokens,
                num_output_tokens=num_output_tokens,
                hash_ids=prefix.prompt(),
                after=tuple(done.key for done in after),
                wait_s=wait_s,
            )
        )
        prefix.grow(num_output_tokens)
        took_s = service_s(num_input_tokens - num_known_tokens, num_output_tokens)
        return Done((session_id, number), arrival_s + took_s, num_input_tokens, num_output_tokens)

    def workload(self, name: str) -> Workload:
        """Return all turns in order of arrival."""
        turns = sorted(self._turns, key=lambda turn: turn.arrival_s)
        return Workload(name=name, block_size=self.block_size, turns=tuple(turns))
