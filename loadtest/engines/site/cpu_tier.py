"""vLLM's CPU tier on a machine without a GPU, for engines that run here.

Scheduler, events, eviction and metrics are vLLM's own; only the copy is torch's. It serves one KV
group, with one block a chunk. The engine imports this module: it must need nothing of warmroute.
"""

from __future__ import annotations

import time
from typing import Any

import torch  # type: ignore[import-not-found]  # in the engine's environment
from vllm.v1.kv_offload.base import (  # type: ignore[import-not-found]
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec  # type: ignore[import-not-found]


class TorchWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the engine's cache and memory beside it, at once."""

    def __init__(self, caches: Any, num_chunks: int) -> None:
        self._own = [
            each.tensor.view(torch.int8).reshape(each.tensor.shape[0], -1)
            for each in caches.tensors
        ]
        self._tier = [
            torch.empty((num_chunks, own.shape[1]), dtype=torch.int8) for own in self._own
        ]
        self._done: list[Any] = []

    def submit_store(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the engine's cache into the tier."""
        return self._copy(job_id, src_spec, dst_spec, self._own, self._tier)

    def submit_load(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the tier into the engine's cache."""
        return self._copy(job_id, src_spec, dst_spec, self._tier, self._own)

    def get_finished(self) -> list[Any]:
        """Return the copies made since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Return at once: copies are made when they are submitted."""

    def _copy(self, job_id: Any, src: Any, dst: Any, source: list[Any], target: list[Any]) -> bool:
        begin_s = time.perf_counter()
        taken = torch.from_numpy(src.block_ids.astype("int64"))
        put = torch.from_numpy(dst.block_ids.astype("int64"))
        for one, other in zip(source, target, strict=True):
            other[put] = one[taken]
        num_bytes = sum(one.shape[1] for one in source) * len(taken)
        took_s = time.perf_counter() - begin_s
        self._done.append(TransferResult(job_id, True, num_bytes, took_s))
        return True


class TorchTier(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU tier with `TorchWorker` for its copies."""

    _worker: TorchWorker | None

    def get_worker(self, kv_caches: Any) -> TorchWorker:
        """Return the one worker, made with the first call."""
        if not self._worker:
            self._worker = TorchWorker(kv_caches, self.num_chunks)
        return self._worker
