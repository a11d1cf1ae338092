"""Hashes in place of randomness: the same in every process, on every platform and at every router.

Draws for a decision, and two ways to map a key to a candidate that move few keys when a candidate
comes or goes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b

from policies.view import CandidateId

Ids = tuple[CandidateId, ...]

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Scramble 64 bits. Source: splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(seed: int, number: int, round_: int = 0) -> int:
    """Draw 64 bits for decision `number`; `round_` numbers several draws of one decision."""
    return mix(mix(mix(seed & _MASK) ^ (number & _MASK)) ^ round_)


def text_hash(text: str) -> int:
    """Hash a name to 64 bits (Python's own hash differs from process to process)."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def rendezvous(ids: Ids, key: int) -> int:
    """Find the index of the candidate with the highest weight for `key`; O(candidates).

    A candidate that goes moves its own keys only, and they spread over all others.
    Source: Thaler, Ravishankar, 1998 (highest random weight).
    """
    weights = [mix(salt ^ key) for salt in _salts(ids)]
    return weights.index(max(weights))


def clockwise(ids: Ids, num_points: int, key: int) -> Iterator[int]:
    """Yield candidate indices clockwise from `key`, repeats included, once round the ring.

    `num_points` virtual nodes per candidate. The ring is built once per tuple of candidates.
    Source: Karger et al., 1997.
    """
    points, owners = _ring(ids, num_points)
    start = bisect_left(points, mix(key))
    yield from owners[start:]
    yield from owners[:start]


@lru_cache(maxsize=256)
def _salts(ids: Ids) -> tuple[int, ...]:
    return tuple(text_hash(id_) for id_ in ids)


@lru_cache(maxsize=64)
def _ring(ids: Ids, num_points: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lay out the ring: points in ascending order, and the candidate index of each."""
    laid = sorted(
        (point, index) for index, id_ in enumerate(ids) for point in _points(id_, num_points)
    )
    return tuple(point for point, _ in laid), tuple(index for _, index in laid)


@lru_cache(maxsize=1024)
def _points(id_: CandidateId, num_points: int) -> tuple[int, ...]:
    """Place one candidate's virtual nodes; kept, so that a changed fleet rebuilds quickly."""
    salt = text_hash(id_)
    return tuple(mix(salt + number) for number in range(num_points))
