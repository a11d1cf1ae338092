"""`warmroute` with a queue that never sends a prompt without room because a replica is idle."""

from __future__ import annotations

from math import inf

from router.cli import main
from router.scheduling import rules

if __name__ == "__main__":
    rules.IDLE_SOON_MS = -inf  # type: ignore[misc]
    main()
