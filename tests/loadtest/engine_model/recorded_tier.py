"""The engine model beside a recording of vLLM's scheduler with a CPU tier.

`tests/engines/record_cpu_tier.py` makes recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadtest.emulator.block_events import EventWriter
from loadtest.engine_model.blocks import Blocks
from loadtest.engine_model.cpu_tier import CpuTier
from loadtest.engine_model.scheduler import Request, Scheduler
from router.base.contracts import HashContract
from router.kv_events.wire import BlockRemoved, BlockStored, KvEvent
from tests.loadtest.engine_model.requests import generation

Json = dict[str, Any]


def differences(recorded: Json) -> list[tuple[int, str, Any, Any]]:
    """List where the model differs from a recording: step, what, vLLM's and the model's.

    vLLM has the blocks of a write in a set, so their order among the events of a step is any.
    """
    replay, found = Replay(recorded), []
    for number, step in enumerate(busy(recorded["steps"])):
        for request in step["new"]:
            replay.add(request)
        made = replay.step(float(number))
        for each in (step, made):
            each["stored"] = sorted(names for kind, names in each["events"] if kind == "stored")
            each["removed"] = [names for kind, names in each.pop("events") if kind == "removed"]
        found += [
            (number, name, step[name], made[name]) for name in made if step[name] != made[name]
        ]
    return found


class Replay:
    """The engine model at the requests of a recording: reads end with the step that begins them."""

    def __init__(self, recorded: Json) -> None:
        size = recorded["block_size"]
        self.blocks = Blocks(recorded["num_blocks"], size)
        self.tier = CpuTier(recorded["num_tier_blocks"], size)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_batched_tokens=recorded["max_num_batched_tokens"],
            max_num_seqs=recorded["max_num_seqs"],
            loader=self,
            tier=self.tier,
        )
        self._writer = EventWriter(self.blocks)
        self._contract = HashContract(algorithm="sha256", block_size=size)
        self._drawn = recorded["requests"]
        self._numbers: dict[Request, int] = {}
        self._reads: list[Request] = []

    def num_tokens(self, request: Request) -> int:
        """Count nothing: the tier says what it has."""
        return 0

    def begin(self, request: Request, num_missing: int) -> None:
        """Record a read."""
        self._reads.append(request)

    def add(self, number: int) -> None:
        """Queue a request of the recording."""
        drawn = self._drawn[number]
        made = generation(self._contract, drawn["prompt"], drawn["answer"])
        self._numbers[made] = number
        self.scheduler.add(made)

    def step(self, now_s: float) -> Json:
        """Make a step; return what came of it, in the form of the recording."""
        step = self.scheduler.schedule(now_s)
        chunks = step.chunks if step is not None else []
        found: Json = {
            "scheduled": {str(self._numbers[each]): num_tokens for each, num_tokens in chunks},
            "cached": {str(self._numbers[each]): each.num_computed_tokens for each, _ in chunks},
            "reads": sorted(str(self._numbers[each]) for each in self._reads),
        }
        if step is not None:
            self.scheduler.complete(step, now_s)
        reads, self._reads = self._reads, []
        for request in reads:
            self.scheduler.loaded(request)
        if not (self.scheduler.running or self.scheduler.waiting):
            assert self.scheduler.schedule(now_s) is None  # writes what is left
        self.blocks.take_changes()
        found["events"] = [
            as_recorded(event) for event in self._writer.tier_events(self.tier.take_changes())
        ]
        return found


def as_recorded(event: KvEvent) -> list[Any]:
    """Write an event of the tier as the recording has it."""
    assert isinstance(event, BlockStored | BlockRemoved)
    return ["stored" if isinstance(event, BlockStored) else "removed", event.block_hashes]


def busy(steps: list[Json]) -> Iterator[Json]:
    """Join steps in which nothing was scheduled to the step before: the model writes at once."""
    joined: Json | None = None
    for step in steps:
        if joined is not None and not step["scheduled"] and not step["new"] and not step["reads"]:
            joined["events"] += step["events"]
            continue
        if joined is not None:
            yield joined
        joined = step | {"events": list(step["events"])}
    if joined is not None:
        yield joined
