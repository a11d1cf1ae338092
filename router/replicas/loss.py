"""What losing a candidate would cost."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class CandidateLoss(Struct, frozen=True, kw_only=True):
    """Tokens that live conversations have at one candidate alone, and the time to compute them."""

    num_tokens: int = 0
    compute_s: float = 0.0  # by its cost model


NO_LOSS: Final = CandidateLoss()
