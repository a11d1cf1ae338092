"""Engines at random work, and an index that must settle on what they store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.index.block_index import BlockMatch
from router.index.copies import TIERS, Tier
from tests.index.contract.backend import Backend
from tests.index.contract.engine import BLOCKS, CHAINS, NUM_BLOCKS, PlayedEngine

CANDIDATES = [CandidateId("a"), CandidateId("b")]


MakeBackend = Callable[[Mapping[CandidateId, PlayedEngine]], Backend]


def machine(make_backend: MakeBackend) -> type[RuleBasedStateMachine]:
    """Make the suite for a backend."""

    class IndexAgainstEngines(RuleBasedStateMachine):
        """Engines work, batches are lost, and the index must settle on the truth."""

        candidates = st.sampled_from(CANDIDATES)
        tiers = st.sampled_from(TIERS)
        numbers = st.integers(0, len(CHAINS) - 1)
        lengths = st.integers(1, NUM_BLOCKS)
        received = st.integers(0, 3)  # one batch of four is lost

        def __init__(self) -> None:
            super().__init__()
            self.engines = {candidate: PlayedEngine(candidate) for candidate in CANDIDATES}
            self.backend = make_backend(self.engines)
            self.claims: list[tuple[CandidateId, list[BlockKey], Callable[[], None]]] = []
            # From which batch on a router may have received each engine's batches without a gap.
            self.starts: dict[CandidateId, set[int]] = {c: {0} for c in CANDIDATES}

        def teardown(self) -> None:
            self.backend.close()

        @rule(
            candidate=candidates,
            tier=tiers,
            number=numbers,
            length=lengths,
            again=st.booleans(),
            received=received,
        )
        def compute(
            self,
            candidate: CandidateId,
            tier: Tier,
            number: int,
            length: int,
            again: bool,
            received: int,
        ) -> None:
            payload = self.engines[candidate].compute(number, length, again=again, tier=tier)
            self._publish(candidate, payload, received)

        @rule(
            candidate=candidates,
            tier=tiers,
            blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6),
            received=received,
        )
        def evict_any(
            self, candidate: CandidateId, tier: Tier, blocks: list[BlockKey], received: int
        ) -> None:
            self._publish(candidate, self.engines[candidate].evict(blocks, tier), received)

        @rule(candidate=candidates, tier=tiers, number=numbers, length=lengths, received=received)
        def evict_tail(
            self, candidate: CandidateId, tier: Tier, number: int, length: int, received: int
        ) -> None:
            tail = reversed(CHAINS[number][-length:])
            self._publish(candidate, self.engines[candidate].evict(tail, tier), received)

        @rule(candidate=candidates, received=received)
        def clear(self, candidate: CandidateId, received: int) -> None:
            self._publish(candidate, self.engines[candidate].clear(), received)

        @rule(candidate=candidates)
        def restart(self, candidate: CandidateId) -> None:
            self.engines[candidate].restart()
            self.starts[candidate] = {0}

        @rule(candidate=candidates, number=numbers, length=lengths, further=st.integers(0, 2))
        def replace(self, candidate: CandidateId, number: int, length: int, further: int) -> None:
            """Be another process that has counted as far as the last one, or past it, unseen."""
            last = self.engines[candidate].last_sequence
            self.restart(candidate)
            engine = self.engines[candidate]
            while engine.last_sequence < last + further:
                engine.compute(number, length, again=True, tier="gpu")

        @rule(candidate=candidates, num_batches=st.integers(1, 3))
        def trim(self, candidate: CandidateId, num_batches: int) -> None:
            self.backend.settle()
            self._note_starts()
            self.engines[candidate].trim(num_batches)

        @rule(candidate=candidates, number=numbers, length=lengths)
        def claim(self, candidate: CandidateId, number: int, length: int) -> None:
            keys = CHAINS[number][:length]
            self.claims.append((candidate, keys, self.backend.claim(candidate, keys)))

        @rule(number=st.integers(0, 4))
        def end(self, number: int) -> None:
            if number < len(self.claims):
                self.claims.pop(number)[2]()

        @rule(what=st.integers(0, 59), how=st.integers(1, 9))
        def disturb(self, what: int, how: int) -> None:
            self.backend.disturb(what, how)

        @rule()
        def look(self) -> None:
            self.backend.settle()
            self._note_starts()
            one_by_one = {key: self.backend.match([key], CANDIDATES) for key in BLOCKS}
            by_chain = [self.backend.match(chain, CANDIDATES) for chain in CHAINS]
            for candidate in CANDIDATES:
                keys = {key: found[candidate] for key, found in one_by_one.items()}
                chains = [found[candidate] for found in by_chain]
                wrong = {
                    start: self._wrong(candidate, start, keys, chains)
                    for start in self.starts[candidate]
                }
                assert "" in wrong.values(), (candidate, wrong)

        # -- inside --------------------------------------------------------------------------

        def _publish(self, candidate: CandidateId, payload: bytes, received: int) -> None:
            if not received:
                return
            if self.engines[candidate].is_new:
                self.engines[candidate].is_new = False
                self.backend.reconnect(candidate)
            self.backend.receive(candidate, self.engines[candidate].last_sequence, payload)

        def _note_starts(self) -> None:
            """A router that began again has read all that is left; or another router knew more."""
            for candidate in self.backend.begun_anew:
                self.starts[candidate].add(self.engines[candidate].first_sequence)
            self.backend.begun_anew.clear()

        def _claimed(self, candidate: CandidateId) -> set[BlockKey]:
            return {key for other, keys, _ in self.claims if other == candidate for key in keys}

        def _wrong(
            self,
            candidate: CandidateId,
            start: int,
            keys: Mapping[BlockKey, BlockMatch],
            chains: Sequence[BlockMatch],
        ) -> str:
            """Return what is wrong for a router that received the batches from `start` on."""
            known = self.engines[candidate].known(start)
            gpu, cpu, claimed = known["gpu"], known["cpu"], self._claimed(candidate)
            for key, match in keys.items():
                said = match.num_gpu_stored_blocks, match.num_gpu_blocks, match.num_cpu_blocks
                least = key in gpu, key in gpu, key in gpu | cpu
                most = key in gpu, key in gpu | claimed, key in gpu | cpu | claimed
                if not all(x <= y <= z for x, y, z in zip(least, said, most, strict=True)):
                    return f"block {BLOCKS.index(key)}: {said}, not {least} to {most}"
            for chain, match in zip(CHAINS, chains, strict=True):
                if not _ends_where_a_prefix_ends(chain, match, gpu, cpu, claimed):
                    return f"{match} of chain {CHAINS.index(chain)}"
            return ""

    return IndexAgainstEngines


def _ends_where_a_prefix_ends(
    chain: Sequence[BlockKey],
    match: BlockMatch,
    gpu: set[BlockKey],
    cpu: set[BlockKey],
    claimed: set[BlockKey],
) -> bool:
    """Return whether a match is right; behind a hole it may be long, but never end in one."""
    for num_blocks, held in (
        (match.num_gpu_stored_blocks, gpu),
        (match.num_gpu_blocks, gpu | claimed),
        (match.num_cpu_blocks, gpu | claimed | cpu),
    ):
        if not set(chain[max(0, num_blocks - 3) : num_blocks]) <= held:
            return False
        if num_blocks and chain[0] not in held:
            return False
    on_gpu, on_either = _closed_prefix(chain, gpu), _closed_prefix(chain, gpu | cpu)
    if on_gpu is None:
        return True
    if on_either is None or claimed:
        return match.num_gpu_stored_blocks == on_gpu
    return match == BlockMatch(on_gpu, on_gpu, on_either)


def _closed_prefix(chain: Sequence[BlockKey], held: set[BlockKey]) -> int | None:
    """Count leading blocks held; None where there are others behind a hole."""
    num_blocks = sum(key in held for key in chain)
    return num_blocks if set(chain[:num_blocks]) <= held else None
