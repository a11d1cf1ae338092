"""What conversations of block ids say: messages of the tiny model's words.

Each turn adds its new tokens as a user's message, behind the answer before it. Every word is one
token wherever it stands, so prompts have as many tokens as the workload says, and the template's.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from functools import lru_cache
from typing import Any

from loadtest import text
from loadtest.tiny_model import MODEL_DIR
from loadtest.traces.blocks import load_tokenizer
from loadtest.workload import Turn, Workload


class Spoken:
    """Makes the messages of a workload's turns; the same ones whenever it is asked.

    The system prompt is the blocks that a session's first prompt has in common with others'.
    """

    __slots__ = ("_num_shared", "_says", "_turns")

    def __init__(self, workload: Workload, seed: int) -> None:
        words = text.of_tokenizer(load_tokenizer(MODEL_DIR)).words
        assert words is not None

        @lru_cache(maxsize=20_000)
        def says(what: str, num_tokens: int) -> str:
            dice = random.Random(f"{seed}/{what}")
            return "".join(dice.choices(words, k=num_tokens))[1:]

        self._says = says
        self._turns: dict[str, list[Turn]] = defaultdict(list)
        for turn in sorted(workload.turns, key=lambda turn: turn.number):
            self._turns[turn.session_id].append(turn)
        firsts = [turns[0] for turns in self._turns.values()]
        uses = Counter(id_ for turn in firsts for id_ in turn.hash_ids)
        self._num_shared = {
            turn.session_id: min(
                turn.num_input_tokens - 1,
                workload.block_size * sum(uses[id_] > 1 for id_ in turn.hash_ids),
            )
            for turn in firsts
        }

    def body(self, turn: Turn) -> dict[str, Any]:
        """Write the messages of a turn: all that was said, and its own."""
        name = turn.session_id
        num_said = self._num_shared[name]
        messages = [self._message("system", "shared", num_said)] if num_said else []
        for each in self._turns[name][: turn.number + 1]:
            what = f"{name}/{each.number}"
            messages.append(self._message("user", what, each.num_input_tokens - num_said))
            num_said = each.num_input_tokens
            if each is not turn:
                messages.append(
                    self._message("assistant", f"{what}/answer", each.num_output_tokens)
                )
                num_said += each.num_output_tokens
        return {"messages": messages}

    def _message(self, role: str, what: str, num_tokens: int) -> dict[str, Any]:
        return {"role": role, "content": self._says(what, max(1, num_tokens))}
