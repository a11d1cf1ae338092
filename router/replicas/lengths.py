"""Replicas of one model that take requests of different lengths.

An engine refuses a prompt that leaves no room for an answer, and cuts an answer that would exceed
its length. So a request goes to a replica with room for its prompt and the answer that it asks for.
Source: vLLM 0.32 v1/engine/input_processor.py, entrypoints/serve/utils/api_utils.py
`get_max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Self

from msgspec import Struct

from router.replicas.replica import Candidate, Replica


class Lengths(Struct, frozen=True):
    """The lengths that a model's replicas take, by name; inf: any, or it is not known."""

    by_replica: dict[str, float]
    longest: int | None  # None: it is not known
    are_equal: bool

    @classmethod
    def of(cls, model: str, replicas: Iterable[Replica]) -> Self:
        """Collect the lengths of a model's replicas, of which there is at least one."""
        reported = {each.name: each.max_len(model) for each in replicas}
        found = {name: inf if length is None else length for name, length in reported.items()}
        longest = max(found.values())
        return cls(found, None if longest == inf else int(longest), len(set(found.values())) == 1)

    def fitting(self, candidates: tuple[Candidate, ...], num_tokens: int) -> tuple[Candidate, ...]:
        """Leave out candidates that are too short; if all are, keep the longest."""
        lengths = [self.by_replica[each.replica.name] for each in candidates]
        least = min(num_tokens, max(lengths, default=0.0))
        return tuple(
            each for each, length in zip(candidates, lengths, strict=True) if length >= least
        )
