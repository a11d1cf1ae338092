"""Record what vLLM's scheduler does with a CPU tier; for the engine's Python, imports only vLLM.

    .engines/venv/bin/python tests/engines/record_cpu_tier.py MODEL_DIR [SEED…]

Scheduler, KV cache manager, offloading connector and LRU are vLLM's own. No model runs: each step
takes the tokens that the recording says, copies to the tier end with the step after, and reads with
their own. Prints JSON: requests, and for each step what was scheduled, what was cached, and every
event of the tier.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch  # type: ignore[import-not-found]
from vllm import SamplingParams, __version__  # type: ignore[import-not-found]
from vllm.config import (  # type: ignore[import-not-found]
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockStored  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (  # type: ignore[import-not-found]
    OffloadingWorkerMetadata,
)
from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # type: ignore[import-not-found]
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # type: ignore[import-not-found]
from vllm.v1.request import Request  # type: ignore[import-not-found]
from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

BLOCK_SIZE = 16
NUM_BLOCKS = 40
NUM_TIER_BLOCKS = 56
MAX_TOKENS = 96  # of a step: long prompts take several
MAX_SEQS = 4
NUM_REQUESTS = 60


class _InOrder(set):  # type: ignore[type-arg]
    """Names in the order of arrival: a set's own order differs from process to process."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), key=int))


def scheduler_of(model: str) -> Scheduler:
    """Make vLLM's scheduler with a CPU tier."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    layers, page = ["layer"], spec.page_size_bytes
    assert page % CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT == 0
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=512),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=512,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": NUM_TIER_BLOCKS * page},
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    cache.num_gpu_blocks = NUM_BLOCKS
    caches = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[KVCacheTensor(page * NUM_BLOCKS, layers, page * NUM_BLOCKS, page)],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=caches,
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        structured_output_manager=StructuredOutputManager(config),
        log_stats=True,
    )


def requests(dice: random.Random) -> list[dict[str, Any]]:
    """Draw prompts that continue, branch and repeat; `after`: steps since the request before."""
    drawn: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    for _ in range(NUM_REQUESTS):
        base = dice.choice(prompts) if prompts and dice.random() < 0.75 else []
        kept = base[: dice.choice([len(base), dice.randrange(len(base) + 1)])]
        new = [dice.randrange(1, 8_000) for _ in range(dice.choice([0, 7, 16, 60, 150]))]
        prompt = (kept + new)[:380] or [dice.randrange(1, 8_000)]
        answer = [dice.randrange(1, 8_000) for _ in range(dice.choice([1, 2, 5, 20, 40]))]
        drawn.append({"prompt": prompt, "answer": answer, "after": dice.choice([0, 0, 1, 3, 20])})
        prompts.append(prompt + answer)
    return drawn


class _Run:
    """One recording."""

    def __init__(self, scheduler: Scheduler, drawn: Sequence[dict[str, Any]]) -> None:
        self._scheduler = scheduler
        self._drawn = drawn
        self._live: dict[str, Request] = {}
        self._hash = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._writing: list[int] = []  # jobs that end with the next step

    def add(self, number: int) -> None:
        """Queue a request."""
        each = self._drawn[number]
        params = SamplingParams(max_tokens=len(each["answer"]), ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        made = Request(
            request_id=str(number),
            prompt_token_ids=each["prompt"],
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hash,
        )
        self._live[str(number)] = made
        self._scheduler.add_request(made)

    def step(self) -> dict[str, Any]:
        """Make a step; return what came of it."""
        scheduler = self._scheduler
        scheduler.finished_req_ids = _InOrder(scheduler.finished_req_ids)
        output = scheduler.schedule()
        meta = output.kv_connector_metadata
        assert meta is not None
        scheduled = dict(output.num_scheduled_tokens)
        cached = {
            name: self._live[name].num_computed_tokens - num_tokens
            for name, num_tokens in scheduled.items()
        }
        read = {job.req_id for job in meta.load_jobs.values()}
        flushed = [job for job in meta.store_jobs if job in meta.jobs_to_flush]
        done = [*self._writing, *meta.load_jobs, *flushed]
        self._writing = [job for job in meta.store_jobs if job not in flushed]
        result = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=[self._sampled(name) for name in scheduled],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_recving=read,
                kv_connector_worker_meta=OffloadingWorkerMetadata(
                    completed_jobs=dict.fromkeys(done, 1)
                ),
            ),
        )
        events: list[Any] = []
        take = scheduler.connector.take_events
        scheduler.connector.take_events = lambda: events.extend(take()) or list(events)
        try:
            scheduler.update_from_output(output, result)
        finally:
            scheduler.connector.take_events = take
        return {
            "scheduled": scheduled,
            "cached": cached,
            "reads": sorted(read, key=int),
            "flushed": len(flushed),
            "events": [
                ["stored" if isinstance(each, BlockStored) else "removed", list(each.block_hashes)]
                for each in events
            ],
        }

    def _sampled(self, name: str) -> list[int]:
        request = self._live[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        return [self._drawn[int(name)]["answer"][request.num_output_tokens]]

    def all(self) -> Iterator[dict[str, Any]]:
        """Yield every step, with the requests that came before it."""
        due, left = 0, list(range(len(self._drawn)))
        while left or self._scheduler.has_requests():
            is_idle = not self._scheduler.has_unfinished_requests()
            new: list[int] = []
            if not (is_idle and self._scheduler.has_requests()):  # else it writes to the tier
                due = 1_000 if is_idle else due
                while left and self._drawn[left[0]]["after"] <= due:
                    due = 0
                    new.append(left.pop(0))
                    self.add(new[-1])
                due += 1
            yield {"new": new, **self.step()}


def record(model: str, seed: int) -> dict[str, Any]:
    """Record one seed."""
    init_none_hash(sha256)
    scheduler = scheduler_of(model)
    drawn = requests(random.Random(f"cpu tier {seed}"))
    return {
        "name": f"seed {seed}",
        "source": f"vllm {__version__} Scheduler, OffloadingConnector, sha256, default seed",
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "num_tier_blocks": NUM_TIER_BLOCKS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_num_seqs": MAX_SEQS,
        "requests": drawn,
        "steps": list(_Run(scheduler, drawn).all()),
    }


def main() -> None:
    """Record the seeds named, or the first."""
    model, *seeds = sys.argv[1:]
    print(json.dumps([record(model, int(seed)) for seed in seeds or ("1",)]))


if __name__ == "__main__":
    main()
