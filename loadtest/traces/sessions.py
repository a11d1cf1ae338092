"""Derive the sessions of a trace that does not name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

FEW: Final = 48
"""A block that this many requests use may still be one long conversation's own."""


class HasBlocks(Protocol):
    """Whatever has a prompt named in blocks."""

    @property
    def hash_ids(self) -> tuple[int, ...]: ...


def sessions_of(trace: Sequence[HasBlocks]) -> list[int]:
    """Join requests that share a block which few use: under 1 % of all, or under `FEW`.

    Returns:
        Session numbers, shape (num_requests,): the index of each session's first request.
    """
    uses: dict[int, list[int]] = {}
    for index, request in enumerate(trace):
        for block in request.hash_ids:
            uses.setdefault(block, []).append(index)
    parent = list(range(len(trace)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for users in uses.values():
        if len(users) < max(FEW, 0.01 * len(trace)):
            for user in users[1:]:
                first, second = root(users[0]), root(user)
                parent[max(first, second)] = min(first, second)
    return [root(index) for index in range(len(trace))]
