"""One request on its way, and where it was put: what the steps hand to one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace
from multidict import CIMultiDictProxy

from policies.cost import costs_of
from policies.policy import Policy
from policies.view import CandidateCost, CandidateId, Decision, ReplicaView, Snapshot
from router.api.apis import Api, Prompt
from router.api.clients import Client
from router.api.encodings import AsSent
from router.api.openai import ChatRequest, CompletionRequest
from router.api.outline import Outline
from router.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract
from router.experiments.assignment import Assignment
from router.index.block_index import BlockMatch
from router.index.claim import Claim
from router.index.hit_length import KvLayout
from router.records.record import AssignmentRecord, PrefillRecord, Try
from router.replicas.deaths import Body
from router.replicas.fleet import Match
from router.replicas.halves import PrefillPlan
from router.replicas.ledger import Lease
from router.replicas.replica import Candidate
from router.scheduling.classes import ServiceClass
from router.tenants import Charge, Tenant
from router.tokens import Tokens
from router.tokens.hand_over import Kind


class Inbound(Struct, frozen=True, kw_only=True):
    """A request as it came in. `target` is path and query, raw; `arrived_s` is monotonic.

    `needs_json`: its body has to be a JSON object, or there is none. `needs_model`: it is about one
    model, named or the only one; else the query may name one, too.
    """

    api: Api
    method: str
    path: str
    target: str
    headers: CIMultiDictProxy[str]
    body: bytes | None
    arrived_s: float
    tenant: Tenant | None = None  # None: clients are not told apart
    model: str | None = None  # named by an event of its connection; None: by the request itself
    needs_json: bool = False
    needs_model: bool = False
    as_sent: AsSent | None = None  # None: not compressed. `body` is what it reads
    client: Client | None = None  # None: a dry run


class Job(Struct, kw_only=True):
    """What is known of a request; each step adds to it. Times are monotonic seconds."""

    inbound: Inbound
    request_id: str
    received: Inbound | None = None  # as it came, before a field had to change; None: a dry run
    digest: Body | None = None  # of that; None: not needed so far
    lost_lease: int | None = None  # of its last try that failed as it does when a replica dies
    model: str | None = None
    streams: bool = False
    keepalive_s: float | None = None  # how often its client gets a comment; None: never
    response_id: str | None = None  # of an earlier response that it is about, or goes on from
    owner: str | None = None  # the replica that issued it: no other has it
    is_kept: bool = False  # its engine may keep the response, so others may ask for it
    session_hash: int | None = None
    parent_session_hash: int | None = None  # of a sub-agent's session
    has_named_session: bool = False  # False: known by its first turn, if at all
    chat: ChatRequest | None = None
    completion: CompletionRequest | None = None
    outline: Outline | None = None  # instead of what it says, where the body was not read whole
    extra: ExtraKeys = NO_EXTRA
    tokens: Tokens | None = None
    way: str = "unknown"  # local | media | prefix | engine | unknown: where from
    num_tokens: int = 0
    num_rest_tokens: int = 0  # of these, estimated behind what is known of the prompt's
    num_more_tokens: int = 0  # of a batch's prompts behind the first
    num_head_tokens: int = 0  # in front of the first image or sound, where that is known
    num_named_tokens: int = 0  # in front of the first of which no engine's name is known
    has_media: bool = False  # it is not text alone
    has_named_media: bool = False  # the client named an image itself: it may name two alike
    num_counted_tokens: int | None = None  # the answer, where it asked for that; None: not known
    chains: dict[HashContract, Sequence[BlockKey]] = {}  # of the tokens; see `keys`
    found: dict[CandidateId, BlockMatch] = {}  # in Redis, where it is asked
    assigned: Assignment | None = None  # its arm of an experiment; None: in none
    is_refused_here: bool = False  # by our chat template; the engine has the last word
    has_side_effects: bool = False  # sending it twice is not the same as sending it once
    skips_pool: bool = False  # under a salt of its own, since a read from the pool failed
    tries: list[Try] = []
    tried: set[str] = set()  # replicas that it may not go to (again)
    is_excused: bool = False  # its last failure says nothing about the replica
    charge: Charge | None = None  # for its uncached tokens; None: not placed yet, or no tenant
    kind: Kind | None = None  # how its prompt is made; None: its ids are not handed over
    handed: bytes | None = None  # the body with its ids, while it is sent
    is_handed_over: bool = False  # its last try was
    prefill: PrefillRecord | None = None  # None: not computed apart, or not yet
    transfer: bytes | None = None  # the body with its transfer's parameters, while it is decoded
    engine_id: str | None = None  # its name at engines that match both halves by it; None: its own
    service_class: ServiceClass | None = None  # None: no prompt of it waits
    deadline_ms: float | None = None  # from its arrival to its first token; None: whenever
    expected_ttft_ms: float | None = None  # so predicted when it came; None: it has no deadline
    expected_tbt_ms: float | None = None  # so predicted when it was let go; None: no limit
    waited_ms: float = 0.0  # until it was let go to a replica
    waited_for: str | None = None  # what it last was held by: `Verdict.why`; None: it was not
    released: str | None = None  # why it was: `Verdict.why`; None: it has not waited
    tokenized_s: float = 0.0
    placed_s: float = 0.0

    @property
    def tenant(self) -> Tenant | None:
        """Whose request it is."""
        return self.inbound.tenant

    @property
    def is_known(self) -> bool:
        """Whether the tokens are known to the prompt's end."""
        return self.tokens is not None and not self.num_rest_tokens

    @property
    def is_matchable(self) -> bool:
        """Whether every block of the prompt has a name: its tokens and its media are known."""
        is_cut = self.has_media and self.num_named_tokens < self.num_tokens
        return self.is_known and not is_cut

    @property
    def num_prompts(self) -> int:
        """Count the prompts of a request: several if it is a batch of completions."""
        return len(self.completion.prompts) if self.completion is not None else 1

    @property
    def num_needed_tokens(self) -> int:
        """Count the tokens that an engine has to have room for; 0: its prompt is not known.

        One token of an answer, if it asks for no more. An estimate counts twice: a replica that
        is too short would refuse it. What engines cut to their length fits everywhere.
        """
        prompt = self.prompt
        if prompt is None or (isinstance(prompt, ChatRequest) and prompt.truncates):
            return 0
        return self.num_tokens * (1 if self.is_known else 2) + max(1, prompt.max_tokens or 1)

    def digests(self, contract: HashContract, positions: Sequence[int]) -> list[bytes]:
        """List the full digests of some of the prompt's blocks; positions ascending."""
        return self.tokens.digests(contract, positions, self.extra) if self.tokens else []

    @property
    def forwarded(self) -> tuple[bytes | None, bool]:
        """The body to forward, and whether it is as its Content-Encoding says.

        Compressed as it came, unless a field of it had to change.
        """
        if self.handed is not None:
            return self.handed, False
        inbound = self.inbound
        if inbound.as_sent is None:
            return inbound.body, True
        if inbound.body is inbound.as_sent.view:
            return inbound.as_sent.body, True
        return inbound.body, False

    def pass_through(self) -> None:
        """Treat it as one whose prompt does not matter: nothing is computed for it."""
        self.chat = self.completion = None

    def is_placed_at(self, candidate: Candidate) -> bool:
        """Return whether its engine computes it there, not at another of its ranks."""
        if candidate.rank is None:
            return True
        return self.inbound.api.honours_rank(candidate.replica.version)

    def drop_content(self) -> None:
        """Let go of what was parsed of the prompt: its tokens are known, its bytes are kept.

        An answer takes minutes, and what was parsed takes more than the body does.
        """
        if self.chat is not None:
            self.chat = replace(
                self.chat, messages=(), tools=None, documents=None, chat_template_kwargs=None
            )
        if self.completion is not None:  # how many prompts it has still matters
            self.completion = replace(self.completion, prompts=("",) * len(self.completion.prompts))

    def set_prompt(self, prompt: Prompt) -> None:
        """Set what decides the prompt."""
        if isinstance(prompt, ChatRequest):
            self.chat = prompt
        else:
            self.completion = prompt

    @property
    def prompt(self) -> Prompt | None:
        """The request as its API defines it; None on routes that are only passed through."""
        return self.chat or self.completion

    def keys(self, contract: HashContract) -> Sequence[BlockKey]:
        """List the keys of the prompt's full blocks, put together once; not to be changed.

        Empty where the tokens are not known. Match, first blocks and claim all want it.
        """
        keys = self.chains.get(contract)
        if keys is None:
            keys = self.tokens.keys(contract, self.extra) if self.tokens is not None else ()
            self.chains[contract] = keys
        return keys


class PoolMatch(Struct, frozen=True):
    """What the shared pool has of one prompt, under one contract's names, in one layout.

    Candidates that can read the same have the same one.
    """

    pool: str  # its name
    directory: str  # of the pool: has the model's name where that has one layout
    contract: HashContract
    chain: Sequence[BlockKey]  # what can be reused at most
    groups: KvLayout | None  # the model's KV groups, where it has several
    num_blocks: int
    num_dropped: int = 0  # of the blocks there, engines drop: the last of each hit (EAGLE, MTP)
    on_disk: Sequence[int] = ()  # of the blocks, the positions of those on SSD only

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.contract.block_size

    def num_disk_tokens(self, num_gpu_tokens: int, num_cpu_tokens: int) -> int:
        """Count the tokens on SSD only that a candidate would read, behind what its GPU has.

        None where the pool has no more than the candidate itself: then it reads its own.
        """
        if not self.on_disk or self.num_tokens <= max(num_gpu_tokens, num_cpu_tokens):
            return 0
        size = self.contract.block_size
        return sum(position * size >= num_gpu_tokens for position in self.on_disk) * size


class Found(Struct, frozen=True, kw_only=True):
    """What candidates and the shared pool have of one prompt."""

    matches: dict[CandidateId, Match]
    pools: Mapping[CandidateId, PoolMatch]  # of candidates in a pool that is counted on
    first_blocks_hash: int | None  # None: not known


class Choice(Struct, frozen=True, kw_only=True):
    """A decision that changed nothing yet."""

    candidate: Candidate
    view: ReplicaView
    decision: Decision
    snapshot: Snapshot
    policy: Policy
    pools: Mapping[CandidateId, PoolMatch]  # of candidates in a pool that is counted on
    assignment: AssignmentRecord | None = None
    plan: PrefillPlan[Choice] | None = None  # None: the candidate computes prompts, too
    is_guess: bool = False  # what the candidate holds is not known from its blocks

    def costs(self) -> tuple[CandidateCost, ...]:
        return costs_of(self.decision, self.snapshot)

    @property
    def pool(self) -> PoolMatch | None:
        """What the chosen one's pool has; None: it is in none, or that is not counted on."""
        return self.pools.get(self.candidate.id)

    @property
    def num_pooled_tokens(self) -> int | None:
        """Count the leading tokens that the pool has, if the chosen one reads it; None: no pool."""
        pool = self.pool
        return pool.num_tokens if pool is not None and self.view.reads_pool else None

    @property
    def prompt(self) -> Choice:
        """The choice of where its prompt is computed: this one, or its plan's."""
        elsewhere = self.plan.choice if self.plan is not None else None
        return self if elsewhere is None else elsewhere

    @property
    def num_pool_tokens(self) -> int:
        """Count what the chosen one would fetch from the pool, beyond what it holds itself."""
        pool, view = self.pool, self.view
        if pool is None or not view.reads_pool:
            return 0
        return max(0, pool.num_tokens - max(view.num_gpu_tokens, view.num_cpu_tokens))

    @property
    def num_disk_tokens(self) -> int:
        """Count the tokens on SSD only among those that it would fetch."""
        if self.pool is None or not self.view.reads_pool:
            return 0
        return self.pool.num_disk_tokens(self.view.num_gpu_tokens, self.view.num_cpu_tokens)

    @property
    def num_likely_tokens(self) -> int:
        """Count the leading tokens that the pool may have been given, 0 if that is no news.

        What a candidate holds that shares it, if that is more than the chosen one has and the pool
        is known to.
        """
        pool = self.pool
        if pool is None or not self.view.reads_pool:
            return 0
        num_known = max(self.view.num_gpu_tokens, self.view.num_cpu_tokens, pool.num_tokens)
        num_held = max(
            view.num_gpu_tokens
            for view in self.snapshot.replicas
            if view.reads_pool and self.pools.get(view.id) is pool
        )
        return num_held if num_held > num_known else 0

    @property
    def num_likely_blocks(self) -> int:
        """Count the same in whole blocks."""
        return self.num_likely_tokens // self.pool.contract.block_size if self.pool else 0


class Placement(Struct, kw_only=True):
    """A decision in force: the candidate, why, and what has to be given back."""

    candidate: Candidate
    decision: Decision
    snapshot: Snapshot
    policy: Policy
    assignment: AssignmentRecord | None = None
    lease: Lease
    claim: Claim | None
    num_gpu_tokens: int  # predicted to be reused from the GPU
    num_cpu_tokens: int  # and beyond those, from the replica's own cpu tier
    num_pool_tokens: int = 0  # and beyond both, fetched from the shared pool
    num_in_pool: int | None = None  # leading tokens in the pool when it was booked; None: not known
    state: str  # exact | degraded | blind
    plan: PrefillPlan[Choice] | None = None  # as of the choice
    is_guess: bool = False  # nothing is predicted
    prefill: Placement | None = None  # where its prompt is computed, if elsewhere

    @property
    def predicted_ttft_ms(self) -> float:
        """Predict the time from here to the first token, its prompt's elsewhere included."""
        elsewhere = self.prefill.lease.predicted_ms if self.prefill is not None else 0.0
        return elsewhere + self.lease.predicted_ms

    @property
    def had_others(self) -> bool:
        """Whether there were other replicas to choose from; ranks of one are one."""
        own = self.candidate.replica.name
        return any(view.id.partition("#")[0] != own for view in self.snapshot.replicas)

    @property
    def may_fetch(self) -> bool:
        """Whether the engine will look for something in the pool, whatever was counted on."""
        num_own = self.num_gpu_tokens + self.num_cpu_tokens
        return (self.num_in_pool or 0) > num_own

    @property
    def num_cached_tokens(self) -> int:
        """Count the prompt tokens predicted to be reused."""
        return self.num_gpu_tokens + self.num_cpu_tokens + self.num_pool_tokens
