"""How hard property tests try: a quarter of their examples, and all of them in `make fuzz`.

A property test says how many examples find what it is for: `max_examples=examples(200)`. Those
that no `@given` marks as such carry `@pytest.mark.hypothesis`, so that `make fuzz` finds them.
"""

from __future__ import annotations

import os
from typing import Final

FUZZ_SECONDS: Final = float(os.environ.get("WARMROUTE_FUZZ_SECONDS", "0"))

_SHARE: Final = 4


def examples(number: int) -> int:
    """Return how many of `number` examples to try now."""
    return number if FUZZ_SECONDS else -(-number // _SHARE)
