"""One rank's stream, and what its engine says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from policies.view import CandidateId
from router.base.contracts import ExtraKeys
from router.index.block_index import BlockIndex
from router.kv_events.stream import RankStream
from router.kv_events.wire import KvEvent
from tests.engine import BLOCK_SIZE, batch, prompt

R1 = CandidateId("r1")


class Talk:
    """A stream, and its engine's batches numbered as they come."""

    def __init__(
        self, *, has_replay: bool = True, index: BlockIndex | None = None, **options: Any
    ) -> None:
        self.index = BlockIndex() if index is None else index
        self.stream = RankStream(
            R1, self.index, **{"block_size": BLOCK_SIZE, "capacity_blocks": 100, **options}
        )
        self.stream.opened(has_replay=has_replay)
        self.history: list[bytes] = []

    def say(self, *payloads: bytes) -> None:
        """Publish batches that are received."""
        for payload in payloads:
            self.history.append(payload)
            self.stream.receive(len(self.history) - 1, payload)

    def tell(self, *events: KvEvent) -> None:
        """Publish one batch."""
        self.say(batch(*events))

    def replay(self, oldest: int = 0) -> None:
        """Serve replays until none is wanted."""
        while self.stream.wanted_replay is not None:
            start = self.stream.begin_replay()
            for sequence in range(max(start, oldest), len(self.history)):
                self.stream.replayed(sequence, self.history[sequence])
            self.stream.end_replay(is_complete=True)

    def join(self) -> Talk:
        self.stream.connected()
        self.replay()
        return self

    def num_matched(self, tokens: list[int], extra: ExtraKeys = ExtraKeys()) -> int:  # noqa: B008
        """Ask as a request does: hash in the stream's contract, look up."""
        chain, _ = self.stream.contract.extend(None, tokens, extra)
        return self.index.match(chain, [R1])[R1].num_gpu_blocks

    def matched(self, numbers: Iterable[int]) -> list[int]:
        return [self.num_matched(prompt(number)) for number in numbers]
