"""Do ahead of a plan what may wait: hash a long prompt in steps, and ask Redis.

Planning itself is synchronous, so that nothing changes between the look-up and the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from time import monotonic
from typing import Final

from msgspec.structs import replace

from router.base.errors import RouterError
from router.base.loop_turns import Turns
from router.index.cache_view import CacheView
from router.replicas.fleet import Fleet
from router.replicas.replica import Candidate
from router.request.lookup import Lookup
from router.request.match import same_names
from router.request.results import Prompt
from router.tokens import Tokens

_HEAVY_TOKENS: Final = 32_768  # hashing them takes 3 ms, and several times that on slow machines


class Ahead:
    """Prepares prompts for planning.

    Args:
        lookup: The index in Redis. None: it is not asked.
        encoders: Where a long chain is hashed.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        caches: CacheView,
        lookup: Lookup | None,
        encoders: Executor,
        turns: Turns,
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._lookup = lookup
        self._encoders = encoders
        self._turns = turns

    def is_due(self, prompt: Prompt) -> bool:
        """Return whether there is anything to do for a prompt."""
        tokens = prompt.tokens
        if tokens is None:
            return False
        return self._lookup is not None or tokens.num_new_tokens > _HEAVY_TOKENS

    async def prepare(self, prompt: Prompt) -> Prompt:
        """Hash a long new prompt, and ask Redis. If anything fails, the request goes on."""
        tokens = prompt.tokens
        assert tokens is not None
        with suppress(RouterError):  # no replica serves it: the plan says so
            candidates = self._candidates(prompt)
            if tokens.num_new_tokens > _HEAVY_TOKENS:
                await self._hash(prompt, tokens, candidates)
            if self._lookup is not None:
                return replace(prompt, found=await self._lookup.find(prompt, candidates))
        return prompt

    def _candidates(self, prompt: Prompt) -> Sequence[Candidate]:
        """List the candidates for a request, or for its prompt.

        Raises:
            UnknownModel, NoReplicaAvailable: there are none.
        """
        model, now_s = prompt.read.model, monotonic()
        candidates = self._fleet.offers.candidates(model, now_s)
        helpers = self._fleet.offers.prefillers(model, None, now_s)
        return same_names(prompt, (*candidates, *helpers))

    async def _hash(self, prompt: Prompt, tokens: Tokens, candidates: Sequence[Candidate]) -> None:
        """Hash a prompt's chain in steps, off the loop where they are long."""
        loop = asyncio.get_running_loop()
        for contract in self._caches.by_contract([each.id for each in candidates]):
            steps = tokens.hashing(contract, prompt.extra)
            try:
                work = next(steps)
                while True:
                    if work is None:
                        await self._turns.take()
                        work = next(steps)
                    else:
                        work = steps.send(await loop.run_in_executor(self._encoders, work))
            except StopIteration:
                pass
