"""How long a step takes on a given GPU: a line in what the step computes.

    step_ms = base + per_token * prefill tokens + per_mtoken2 * (token, context) pairs / 1e6
            + per_decode * decodes + per_mtoken_context * decode context tokens / 1e6

Linear layers cost by token, attention by pair, decoding by the weights (in `base`) and the KV
cache that it reads. Source of the prefill shape: FAST'25 Mooncake, Eq. 1.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class StepWork(Struct, gc=False):
    """What one scheduler step computes."""

    num_prefill_tokens: int = 0
    num_prefill_pairs: float = 0.0  # sum over chunks of tokens * (context + tokens / 2)
    num_decodes: int = 0
    num_decode_context_tokens: int = 0


class TimeModel(Struct, frozen=True, kw_only=True, gc=False):
    """Milliseconds a step costs; all parameters non-negative."""

    base_ms: float = 0.0
    ms_per_prefill_token: float = 0.0
    ms_per_mtoken2: float = 0.0
    ms_per_decode: float = 0.0
    ms_per_mtoken_context: float = 0.0

    def step_s(self, work: StepWork) -> float:
        """Predict a step's duration in seconds."""
        return 1e-3 * (
            self.base_ms
            + self.ms_per_prefill_token * work.num_prefill_tokens
            + self.ms_per_mtoken2 * work.num_prefill_pairs * 1e-6
            + self.ms_per_decode * work.num_decodes
            + self.ms_per_mtoken_context * work.num_decode_context_tokens * 1e-6
        )

    def steps_s(self, work: StepWork, num_steps: int) -> float:
        """Predict the duration of steps that only decode; each reads one more token a request."""
        more_ms = self.ms_per_mtoken_context * work.num_decodes * 1e-6
        return num_steps * self.step_s(work) + 5e-4 * more_ms * num_steps * (num_steps - 1)


# From data sheets, at the utilisation that serving engines reach: half of the dense bf16 FLOP/s in
# linear layers, 0.4 of it in attention, 0.8 of the memory bandwidth.
#
#   per_prefill_token  = 2 * parameters / FLOP/s.
#   per_mtoken2        = 4 * layers * hidden / FLOP/s.
#   base               = weight bytes / bandwidth.
#   per_mtoken_context = KV bytes / bandwidth.
#   per_decode         is an estimate of sampling and bookkeeping.
#
# 8B: Llama 3.1 8B, 32 layers, hidden 4096, 131,072 bytes of KV a token. 70B: 80 layers, hidden
# 8192, 327,680 bytes of KV a token, on four GPUs. H100 SXM: 989 TFLOP/s, 3.35 TB/s. A100 80 GB:
# 312 TFLOP/s, 2.0 TB/s.
_PRESETS: Final = {
    "h100-8b": (6.0, 0.033, 1.3, 0.03, 49.0),
    "a100-8b": (10.0, 0.103, 4.2, 0.05, 82.0),
    "h100x4-70b": (13.0, 0.071, 1.7, 0.04, 31.0),
    # Two vLLM 0.32.0 CPU engines with `loadtest.tiny_model`, sharing two cores with their API
    # servers, a router and a client. Measured with prompts of 250 to 12,000 tokens on both at once.
    # Decodes are fitted to runs of agents without a pool. Nearly all of the time is attention.
    "cpu-tiny": (3.2, 0.002, 3.4, 0.8),
    # The same with a model of 4 layers of 256 values (slow prefill).
    "cpu-slow": (3.2, 0.025, 12.9, 0.8),
    "instant": (),
}
"""The parameters of each in the order of `TimeModel`; those that are left out are 0."""
PRESETS: Final = {
    name: TimeModel(**dict(zip(TimeModel.__struct_fields__, values, strict=False)))
    for name, values in _PRESETS.items()
}
