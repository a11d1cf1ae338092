"""Find all that placing a request needs to know: its tokens, its blocks, its session's owner."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from msgspec.structs import asdict, replace

from router.discovery.served_models import ServedModels
from router.replicas.fleet import Fleet
from router.request.ahead import Ahead
from router.request.owners import Owners
from router.request.queue import WaitingRoom
from router.request.read import extra_keys
from router.request.results import Prompt, Read, Variant
from router.request.tokenize import Tokenizer

Choose = Callable[[Read], Variant | None]


class Prompts:
    """Turns requests that were read into prompts that can be placed.

    choose: Says how a prompt is placed; it is asked once. None: all are placed in one way.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        models: ServedModels,
        owners: Owners,
        tokenizer: Tokenizer,
        ahead: Ahead,
        queue: WaitingRoom,
    ) -> None:
        self._fleet = fleet
        self._models = models
        self._owners = owners
        self.tokenizer = tokenizer
        self._ahead = ahead
        self._queue = queue
        self.choose: Choose | None = None

    async def count(self, read: Read) -> int | None:
        """Count the tokens of a request that asks for that. None: an engine has to."""
        await self._look_for_model(read)
        return await self.tokenizer.count(read)

    async def of(self, read: Read) -> Prompt:
        """Find the tokens of a request, and who must or may answer it.

        Raises:
            RouterError: it is refused.
        """
        await self._look_for_model(read)
        owner = await self._owners.find(read) if read.response_id is not None else None
        if read.request is None or read.inbound.api.counts:
            read = replace(read, request=None)
            return Prompt(read=read, owner=owner, tokenized_s=monotonic())
        tokenized = await self.tokenizer.find(read)
        variant = self.choose(read) if self.choose is not None else None
        service_class, deadline_ms = self._queue.service(read, variant)
        prompt = Prompt(
            **asdict(tokenized),
            read=read.without_content(),
            owner=owner,
            extra=extra_keys(self._fleet, read.model or "", read.salt),
            variant=variant,
            service_class=service_class,
            deadline_ms=deadline_ms,
        )
        if self._ahead.is_due(prompt):
            prompt = await self._ahead.prepare(prompt)
        return replace(prompt, tokenized_s=monotonic())

    async def _look_for_model(self, read: Read) -> None:
        """Ask replicas whether they serve a model that none is known to serve."""
        if read.model and self._fleet.members.served.get(read.model) is None:
            await self._models.look_for(read.model)
