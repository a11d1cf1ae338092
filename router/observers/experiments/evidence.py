"""Evidence that a mean is above its bound, valid at every look.

The evidence is the wealth of a bettor against "the mean is at most b". A bet L on the next value x
in [0, 1] turns wealth w into w (1 + L (x - b)). If the mean is at most b, no bet gains on average,
so wealth that starts at 1 ever reaches 1/alpha with probability alpha at most (Ville). Stopping at
1/alpha is therefore wrong with that probability at most, however often one looks. Small bets
detect a small excess, large bets detect a large one soon.
Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting,
JRSS B 86 (2024), section 4.
"""

from __future__ import annotations

from math import exp, log, log1p

_BETS = (0.01, 0.03, 0.1, 0.3, 0.9)
"""As shares of the largest bet that cannot lose everything, 1/b."""


class Evidence:
    """Wealth of the bets against one bound in (0, 1); O(1) in time and space."""

    __slots__ = ("_bets", "_logs", "bound", "num", "total")

    def __init__(self, bound: float) -> None:
        if not 0.0 < bound < 1.0:
            raise ValueError(f"a bound lies between 0 and 1: {bound}")
        self.bound = bound
        self.num = 0
        self.total = 0.0
        self._bets = [bet / bound for bet in _BETS]
        self._logs = [0.0] * len(_BETS)

    def add(self, value: float) -> None:
        """Record a value in [0, 1]."""
        excess = value - self.bound
        self._logs = [
            wealth + log1p(bet * excess) for wealth, bet in zip(self._logs, self._bets, strict=True)
        ]
        self.num += 1
        self.total += value

    @property
    def mean(self) -> float | None:
        """Return the mean so far; None: no value yet."""
        return self.total / self.num if self.num else None

    @property
    def log_wealth(self) -> float:
        """Return the natural logarithm of the wealth; compare it with log(1 / alpha)."""
        most = max(self._logs)
        return most + log(sum([exp(each - most) for each in self._logs]) / len(self._logs))
