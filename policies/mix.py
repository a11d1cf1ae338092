"""Hashes in place of randomness: stateless, alike in every process and on every platform."""

from __future__ import annotations

from hashlib import blake2b

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Scramble 64 bits. Source: splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(seed: int, number: int, round_: int = 0) -> int:
    """Draw 64 bits for decision `number`; `round_` tells several draws of one decision apart."""
    return mix(mix(mix(seed & _MASK) ^ (number & _MASK)) ^ round_)


def text_hash(text: str) -> int:
    """Hash a name to 64 bits (Python's own hash differs from process to process)."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
