"""What the steps of a request return, in the order in which they run.

    Inbound    the request as it came in
    Read       what it says, as far as routing needs it          read.py
    Prompt     its tokens, its session, and what it may cost     prompt.py
    Plan       a decision that changed nothing yet               place.py
    Placement  a decision in force                               place.py
    Sent       an answer that has begun                          send.py
    Passage    that answer on its way to the client              send.py

All are frozen but `Placement`, which ends once, `Tries`, which grows with each failed try, and
`Passage`. Steps and observers name these types. This file names no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace
from multidict import CIMultiDictProxy

from policies.cost import costs_of
from policies.policy import Policy
from policies.view import CandidateCost, CandidateId, Decision, Holding, ReplicaView, Snapshot
from router.api.answers import Usage
from router.api.apis import Api, Request
from router.api.body import AsSent, Outline
from router.api.digests import PartDigests
from router.api.openai import ChatRequest, CompletionRequest
from router.api.sessions import Client
from router.base.caller import ANYBODY, Caller
from router.base.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract
from router.base.errors import UpstreamError
from router.index.block_index import BlockMatch
from router.index.candidate_stream import Claim
from router.index.hit_length import KvLayout
from router.records.record import AssignmentRecord, Outcome, PrefillRecord, Try
from router.replicas.deaths import Body
from router.replicas.ledger import Lease
from router.replicas.replica import Candidate
from router.scheduling.order import ServiceClass
from router.scheduling.waiting import Waiting
from router.tokens import Tokens
from router.tokens.hand_over import Kind

if TYPE_CHECKING:
    from router.upstream import Answer  # loadtest uses these types, and no client


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
    caller: Caller = ANYBODY
    needs_json: bool = False
    needs_model: bool = False
    as_sent: AsSent | None = None  # None: in UTF-8 already. `body` is in UTF-8
    client: Client | None = None  # None: a dry run
    slots: dict[object, Any] = {}  # of observers: what each remembers of the request

    @property
    def owner(self) -> str:
        """Name the cache that its prompts are remembered with: its caller's own, or all others'."""
        return self.caller.salt or ""


class Whose(Struct, frozen=True, kw_only=True):
    """The session of a request: digests of its client's name for it, or of its first turn.

    session_hash, parent_session_hash: As routing knows it and the one that started it, by model.
    is_named: False: it is known by its first turn, if at all.
    conversation, parent: The same, whatever the model. None: there is none, or the request has no
        prompt.
    parts: Digests of tools, system prompt and messages. None: it is no chat, or too large.
    """

    session_hash: int | None = None
    parent_session_hash: int | None = None
    is_named: bool = False
    conversation: int | None = None
    parent: int | None = None
    parts: PartDigests | None = None


NO_SESSION = Whose()


class Read(Struct, frozen=True, kw_only=True):
    """What a request says.

    inbound: The request as it is forwarded: without fields that clients may not set, with the salt
        of its caller.
    received: The request as it came.
    request: What decides its prompt. None: the route is only passed through.
    num_prompts: Several if it is a batch of completions.
    outline: Set if the body was not read whole.
    kind: What decides its prompt besides the messages. None: engines get no token ids for it.
    keepalive_s: How often its client gets a keep-alive before the first token, also if it does not
        wait in the queue. None: never.
    response_id: An earlier response that the request is about, or goes on from.
    is_kept: Its engine may keep the response, so others may ask for it.
    whose: The session that it is a turn of.
    has_side_effects: Sending the request twice is not the same as sending it once.
    """

    inbound: Inbound
    received: Inbound
    request_id: str
    model: str | None = None
    streams: bool = False
    request: Request | None = None
    num_prompts: int = 1
    outline: Outline | None = None
    kind: Kind | None = None
    salt: str | None = None
    keepalive_s: float | None = None
    response_id: str | None = None
    is_kept: bool = False
    whose: Whose = NO_SESSION
    has_side_effects: bool = False

    @property
    def chat(self) -> ChatRequest | None:
        """The request, if it is a chat."""
        return self.request if isinstance(self.request, ChatRequest) else None

    @property
    def completion(self) -> CompletionRequest | None:
        """The request, if it is a completion."""
        return self.request if isinstance(self.request, CompletionRequest) else None

    def without_content(self) -> Read:
        """Drop what was parsed of the prompt, once its tokens are known. Its bytes are kept.

        An answer takes minutes, and parsed content takes more memory than the body does.
        """
        match self.request:
            case ChatRequest():
                slim: Request = replace(
                    self.request, messages=(), tools=None, documents=None, chat_template_kwargs=None
                )
            case CompletionRequest():
                slim = replace(self.request, prompts=())
            case _:
                return self
        return replace(self, request=slim)


class Tokenized(Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, as far as they are known.

    way: Where they are from: local | media | prefix | engine | unknown.
    num_rest_tokens: Of `num_tokens`, how many are estimated behind the known ones.
    num_more_tokens: Tokens of a batch's prompts behind the first.
    num_head_tokens: In front of the first image, if that is known.
    num_named_tokens: In front of the first image whose name at the engine is not known.
    has_named_media: The client named an image itself, so it may give two images one name.
    is_refused_here: Our chat template refuses it. The engine has the last word.
    """

    tokens: Tokens | None = None
    way: str = "unknown"
    num_tokens: int = 0
    num_rest_tokens: int = 0
    num_more_tokens: int = 0
    num_head_tokens: int = 0
    num_named_tokens: int = 0
    has_media: bool = False
    has_named_media: bool = False
    is_refused_here: bool = False


class Variant(Struct, frozen=True, kw_only=True, gc=False):
    """How one request is placed, if not as all others are; see `Prompts.choose`.

    waits: Whether it may have to wait. None: as all others.
    fill: Its `queue.fill`. None: that of all others.
    record: For its decision record; `record.label` is what people see.
    """

    policy: Policy
    waits: bool | None = None
    fill: float | None = None
    record: AssignmentRecord


class Prompt(Tokenized, frozen=True, kw_only=True):
    """A request that can be placed: its tokens, and what decides when and where it goes.

    owner: The replica that issued the response it is about; no other has it.
    extra: What names its blocks besides tokens.
    found: What Redis knows of its blocks, where Redis is asked.
    variant: How it is placed. None: as all others are.
    service_class, deadline_ms: None if requests do not wait; the deadline counts from its arrival.
    original: The same request before it failed to fetch blocks. This one has a salt of its own, so
        that no cache has anything of it.
    """

    read: Read
    owner: str | None = None
    extra: ExtraKeys = NO_EXTRA
    chains: dict[HashContract, Sequence[BlockKey]] = {}  # see `keys`
    found: Mapping[CandidateId, BlockMatch] = {}
    variant: Variant | None = None
    service_class: ServiceClass | None = None
    deadline_ms: float | None = None
    original: Prompt | None = None
    tokenized_s: float = 0.0

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
    def num_needed_tokens(self) -> int:
        """Count the tokens that an engine must have room for; 0: the prompt is not known.

        One token of an answer, if it asks for no more. An estimate counts twice, because a replica
        that is too short would refuse the request. A prompt that engines truncate fits everywhere.
        """
        request = self.read.request
        if request is None or (isinstance(request, ChatRequest) and request.truncates):
            return 0
        return self.num_tokens * (1 if self.is_known else 2) + max(1, request.max_tokens or 1)

    def keys(self, contract: HashContract) -> Sequence[BlockKey]:
        """List the keys of the prompt's full blocks, computed once; not to be changed.

        Empty if the tokens are not known.
        """
        keys = self.chains.get(contract)
        if keys is None:
            tokens = self.tokens
            keys = tokens.keys(contract, self.extra) if tokens is not None else ()
            self.chains[contract] = keys
        return keys

    def digests(self, contract: HashContract, positions: Sequence[int]) -> list[bytes]:
        """List the full digests of some of the prompt's blocks; positions ascending."""
        return self.tokens.digests(contract, positions, self.extra) if self.tokens else []

    def is_placed_at(self, candidate: Candidate) -> bool:
        """Return whether its engine computes it there, not at another of its ranks."""
        if candidate.rank is None:
            return True
        return self.read.inbound.api.honours_rank(candidate.replica.version)


class Wait(Struct, frozen=True, kw_only=True):
    """What the queue did with a request.

    held_by, released: Why it waited last, and why it was sent (`Verdict.why`). None: it did not.
    expected_ttft_ms: Predicted on arrival, if it has a deadline.
    expected_tbt_ms: Inter-token latency, predicted when it was sent, if there is a limit.
    """

    waited_ms: float = 0.0
    held_by: str | None = None
    released: str | None = None
    expected_ttft_ms: float | None = None
    expected_tbt_ms: float | None = None


NO_WAIT = Wait()


class Tries(Struct, kw_only=True):
    """The tries of one request so far, and what they leave behind for the next.

    records: For the decision record, the last try included.
    failed: The lease and the failure of each failed try.
    replicas: Names of replicas that the request may not go to (again).
    only: Names of the replicas that it may go to. None: to any other.
    is_excused: The last failure says nothing about its replica.
    digest: Of the body as it came; None: not needed so far.
    lost_lease: Of the last try that failed as it does when a replica dies.
    helped: Where its prompt was computed; None: prompts are not computed apart.
    failed_helper: The replica that failed to compute it, if another one may be asked.
    wait: What the queue did with it; a retry does not wait again.
    waiting: Its place in the queue, from when it begins to wait.
    on_wait: Called then. None: no caller needs it.
    """

    records: list[Try] = []
    failed: list[tuple[Lease, str]] = []
    replicas: set[str] = set()
    only: frozenset[str] | None = None
    is_excused: bool = False
    digest: Body | None = None
    lost_lease: int | None = None
    helped: PrefillRecord | None = None
    failed_helper: str | None = None
    wait: Wait = NO_WAIT
    waiting: Waiting | None = None
    on_wait: Callable[[], None] | None = None


class Fetchable(Struct, frozen=True, kw_only=True):
    """What the shared pool has of one prompt, under one contract's names, in one layout.

    pool: Its name.
    directory: Of the pool: has the model's name where that has one layout.
    candidates: Those that can read it.
    chain: What can be reused at most.
    groups: The model's KV groups, where it has several.
    num_dropped: Of the blocks there, engines drop: the last of each hit (EAGLE, MTP).
    on_disk: Of the blocks, the positions of those on SSD only.
    """

    pool: str
    directory: str
    candidates: AbstractSet[CandidateId]
    contract: HashContract
    chain: Sequence[BlockKey]
    groups: KvLayout | None
    num_blocks: int
    num_dropped: int = 0
    on_disk: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.contract.block_size

    @property
    def is_whole(self) -> bool:
        """Whether all that can be reused is there."""
        return self.num_blocks >= len(self.chain)

    def num_disk_tokens(self, num_gpu_tokens: int, num_cpu_tokens: int) -> int:
        """Count the tokens on SSD only that a candidate would read, behind those on its GPU.

        None if the pool has no more than the candidate itself, which then reads its own.
        """
        if not self.on_disk or self.num_tokens <= max(num_gpu_tokens, num_cpu_tokens):
            return 0
        size = self.contract.block_size
        return sum(position * size >= num_gpu_tokens for position in self.on_disk) * size


class Split(Struct, frozen=True, kw_only=True):
    """Whether another replica computes the prompt of one that decodes; times are predictions."""

    why: str
    here_ms: float  # to compute its KV where it is decoded, the delay of others included
    there_ms: float  # to compute it elsewhere and read it


class Plan(Struct, frozen=True, kw_only=True):
    """A decision that changed nothing yet.

    helper: Where another candidate computes the prompt first. None: this candidate does.
    split: How that was decided. None: the candidate computes prompts, too.
    helps: It is such a helper's.
    """

    candidate: Candidate
    view: ReplicaView
    decision: Decision
    snapshot: Snapshot
    policy: Policy
    fetchable: Fetchable | None = None  # None: the candidate shares no cache that is counted on
    helper: Plan | None = None
    split: Split | None = None
    helps: bool = False
    is_guess: bool = False  # what the candidate holds is not known from its blocks

    def costs(self) -> tuple[CandidateCost, ...]:
        return costs_of(self.decision, self.snapshot)

    @property
    def prediction(self) -> Holding:
        """What the engine is predicted to reuse. A guess predicts nothing."""
        view = self.view
        if self.is_guess:
            return Holding(num_pool_tokens=view.num_pool_tokens, reads_pool=False)
        return Holding(
            view.num_gpu_tokens,
            view.num_cpu_tokens,
            view.num_pool_tokens,
            view.num_disk_tokens,
            view.reads_pool,
        )


class Placement(Struct, kw_only=True):
    """A decision in force, and what the request holds until `Place.end`.

    plan: The decision. What is predicted may be newer: see `Place.rebook`.
    candidate, replica: Where the request goes; the replica's name.
    predicted: What the engine is predicted to reuse.
    state: exact | degraded | blind.
    helper: Where another candidate computes its prompt first.
    slots: Of observers: what each remembers of the lease.
    """

    plan: Plan
    candidate: Candidate
    replica: str
    predicted: Holding
    lease: Lease
    claim: Claim | None
    state: str
    placed_s: float
    helper: Placement | None = None
    slots: dict[object, Any] = {}
    is_ended: bool = False

    @property
    def predicted_ttft_ms(self) -> float:
        """Predict the time from here to the first token, its prompt's elsewhere included."""
        elsewhere = self.helper.lease.predicted_ms if self.helper is not None else 0.0
        return elsewhere + self.lease.predicted_ms

    @property
    def had_others(self) -> bool:
        """Whether there were other replicas to choose from; ranks of one are one."""
        own = self.replica
        for view in self.plan.snapshot.replicas:
            if view.id.partition("#")[0] != own:
                return True
        return False

    @property
    def may_fetch(self) -> bool:
        """Whether the engine will look for something to fetch, whatever was counted on."""
        num_shared = self.predicted.num_pool_tokens
        return num_shared is not None and num_shared > self.predicted.num_own_tokens


class Sent(Struct, frozen=True, kw_only=True):
    """How one try ended: an answer that has begun, or an error. A failure may be either.

    kind: How the prompt was made, as evidence for handing ids over. None: it is no evidence.
    has_ids: The engine was handed the prompt's token ids.
    """

    answer: Answer | None = None
    error: UpstreamError | None = None
    failure: str | None = None  # None: it did not fail
    kind: Kind | None = None
    has_ids: bool = False

    def close(self) -> None:
        """Close the connection of an answer that is not passed on."""
        if self.answer is not None:
            self.answer.close()


class Passage(Struct, kw_only=True):
    """An answer that is passed on.

    first_s: When its first token came, or what there is instead (`Answer.first_s`). None: not yet.
    outcome: How it ended, as far as it was passed on.
    last_usage: Of a stream whose client left with its last event.
    """

    prompt: Prompt
    tries: Tries
    placement: Placement
    sent: Sent
    answer: Answer
    first_s: float | None
    outcome: Outcome = Outcome.CLIENT_GONE
    last_usage: Usage | None = None
