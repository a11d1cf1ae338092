"""One request on its way, and where it was put: what the stages hand to one another."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from multidict import CIMultiDictProxy

from policies.view import Decision, Snapshot
from router.api.openai import ChatRequest, CompletionRequest
from router.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract
from router.fleet.ledger import Lease
from router.fleet.replica import Candidate
from router.index.caches import Claim
from router.prompt import Tokens
from router.records import Try

Api = Literal["chat", "completions", "other"]


class Inbound(Struct, frozen=True, kw_only=True):
    """A request as it came in. `target` is path and query, raw; `arrived_s` is monotonic."""

    api: Api
    method: str
    path: str
    target: str
    headers: CIMultiDictProxy[str]
    body: bytes | None
    arrived_s: float


class Job(Struct, kw_only=True):
    """What is known of a request; each stage adds to it. Times are monotonic seconds."""

    inbound: Inbound
    request_id: str
    model: str | None = None
    streams: bool = False
    session: str | None = None
    session_hash: int | None = None
    chat: ChatRequest | None = None
    completion: CompletionRequest | None = None
    extra: ExtraKeys = NO_EXTRA
    tokens: Tokens | None = None
    way: str = "unknown"  # local | engine | unknown: where the tokens come from
    num_tokens: int = 0
    chains: dict[HashContract, list[BlockKey]] = {}  # of the tokens; see `keys`
    is_refused_here: bool = False  # by our chat template; the engine has the last word
    tries: list[Try] = []
    tokenized_s: float = 0.0
    placed_s: float = 0.0

    @property
    def prompt(self) -> ChatRequest | CompletionRequest | None:
        """The request as its API defines it; None on routes that are only passed through."""
        return self.chat or self.completion

    def keys(self, contract: HashContract) -> list[BlockKey]:
        """List the keys of the prompt's full blocks, put together once; not to be changed.

        Empty where the tokens are not known. A copy is some 20 µs for 100,000 tokens, and match,
        first blocks and claim all want it.
        """
        keys = self.chains.get(contract)
        if keys is None:
            keys = self.tokens.keys(contract, self.extra) if self.tokens is not None else []
            self.chains[contract] = keys
        return keys


class Placement(Struct, kw_only=True):
    """A decision that counts: who, why, and what has to be given back."""

    candidate: Candidate
    decision: Decision
    snapshot: Snapshot
    policy: str
    lease: Lease
    claim: Claim | None
    num_gpu_tokens: int  # predicted to be reused from the GPU
    num_cpu_tokens: int  # and beyond those, from the replica's own cpu tier
    state: str  # exact | degraded | blind

    @property
    def num_cached_tokens(self) -> int:
        """Count the prompt tokens predicted to be reused."""
        return self.num_gpu_tokens + self.num_cpu_tokens
