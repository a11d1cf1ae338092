"""What the steps of a request return, in the order in which they run.

    Inbound    the request as it came in
    Read       what it says, as far as routing needs it          read.py
    Prompt     its tokens, its session, and what it may cost     prompt.py
    Plan       a decision that changed nothing yet               plan.py, made by place.py
    Placement  a decision in force                               plan.py, made by place.py
    Sent       an answer that has begun                          send.py

All are frozen but `Placement`, which ends once, and `Tries`, which grows with each failed try.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from multidict import CIMultiDictProxy

from policies.policy import Policy
from policies.view import CandidateId
from router.api.apis import Api, Request
from router.api.body import AsSent, Outline
from router.api.digests import PartDigests
from router.api.openai import ChatRequest, CompletionRequest
from router.api.sessions import Client
from router.base.caller import ANYBODY, Caller
from router.base.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract
from router.index.block_index import BlockMatch
from router.records.record import AssignmentRecord, PrefillRecord, Try
from router.replicas.deaths import Body
from router.replicas.ledger import Lease
from router.replicas.replica import Candidate
from router.scheduling.order import ServiceClass
from router.scheduling.waiting import Waiting
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
