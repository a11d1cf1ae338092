"""One bound for the bytes of all answers and bodies that are kept, those in flight included."""

from __future__ import annotations


class Held:
    """Counts the bytes that are kept.

    Args:
        most: The bound, in bytes.
    """

    __slots__ = ("most", "num_bytes")

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """Return whether so many more bytes are within the bound."""
        return self.num_bytes + num_bytes <= self.most

    def take(self, num_bytes: int) -> bool:
        """Count so many more bytes; False: they exceed the bound, and nothing is counted."""
        if not self.fits(num_bytes):
            return False
        self.num_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """Count so many bytes less."""
        self.num_bytes -= num_bytes
