"""How figures are written for people."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """Write a size in three digits."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"
