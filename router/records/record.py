"""The decision record: one JSON line per request, enough to decide again and to audit.

No prompt text, no key, no session id: sessions are digests, prompts are counts. `schema` changes
when a field changes its meaning; readers ignore fields they do not know.

A record has a cause for each prompt token that an engine computed, and how the request ended.

The words explain to an agent's user why prompt tokens were computed, and what can be done about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta, Struct

from policies.view import CandidateCost, CandidateId, Decision, Snapshot

Cause = Literal[
    "new", "changed", "evicted", "moved", "cleared", "pool_lost", "fetch_failed", "salt_or_model",
    "last_block", "unknown",
]  # fmt: skip
"""Why a token was computed.

    new            it was never in a prompt of the conversation, or of its parent
    changed        the prompt is another one from some token on, see `Change`
    evicted        the replica needed the room
    moved          the router sent the request to a replica that did not have it
    cleared        the replica's cache was emptied: a restart, sleep, a reset
    pool_lost      the shared pool had it and lost it
    fetch_failed   the pool has it, and the read failed
    salt_or_model  another salt, model or adapter: blocks are not shared
    last_block     engines share full blocks only, and compute at least the last token
    unknown        it is not known what the conversation had before
"""

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Figure = Annotated[float, Meta(ge=-1e15, le=1e15)]

Part = Literal[
    "tools", "tool_order", "system", "later_system", "message", "compacted", "template", "text"
]
"""Where a prompt changed.

    tools        a tool was added, removed or described otherwise
    tool_order   the same tools in another order
    system       the system prompt
    later_system a system message was added, which the chat template joins to the first
    message      a message that an earlier request had, too
    compacted    the history was replaced by a shorter one
    template     the same messages, which the chat template writes otherwise (reasoning left out)
    text         the prompt has no messages
"""


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first difference between a prompt and the one before.

    index: Of the message in the request's list.
    offset: Tokens in front of it, in whole blocks.
    digest: Of the part as it is now, 16 hex digits; "": it has none.
    num_in_row: So many turns of the conversation in a row have changed there.
    """

    part: Part
    offset: _Count
    index: _Count | None = None
    digest: str = ""
    num_in_row: _Count = 1


class Move(Struct, frozen=True, kw_only=True):
    """A turn that went to another replica than the one before; times as predicted.

    has_left: The replica could not be chosen: it is down, drains, or is gone.
    """

    origin: str
    ttft_here_ms: _Figure | None = None
    ttft_there_ms: _Figure | None = None
    has_left: bool = False


class Loss(Struct, frozen=True, kw_only=True):
    """The first block that was there and is lost.

    replica: That had it.
    ago_s: How long before the request it was evicted, if the events of that are remembered.
    since_s: Between the conversation's last turn and this one.
    num_between_tokens: Computed at that replica in between, for other requests.
    """

    replica: str
    since_s: _Figure
    num_between_tokens: _Count
    ago_s: _Figure | None = None


class Computed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prompt tokens that an engine computed, by cause.

    tokens: By cause; their sum is the engine's own count. No cause has 0 tokens.
    num_before: Leading tokens, in whole blocks, that an earlier prompt of the conversation had.
    """

    tokens: dict[Cause, _Count]
    num_before: _Count = 0
    change: Change | None = None
    move: Move | None = None
    loss: Loss | None = None

    @property
    def num_tokens(self) -> int:
        """Count all tokens that were computed."""
        return sum(self.tokens.values())

    @property
    def num_again(self) -> int:
        """Count those that the conversation had before."""
        return self.num_tokens - self.tokens.get("new", 0)


SCHEMA = 2
"""1: what the pool had was one number, `snapshot.num_pool_tokens`; now it is each candidate's."""


class Try(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt: where, and how it failed (None: it did not)."""

    candidate: str
    failure: str | None = None


class PrefillRecord(Struct, frozen=True, kw_only=True):
    """Where the prompt of a request was computed that a decode replica answered.

    `result`: remote, at `candidate`; local, where it was decoded; failed: at `candidate` it was
    not, so it was where it was decoded. `why` says the reason in a word. `policy` to `decision`:
    how that was chosen among the prefill replicas; None: none of them was, or an older record.
    """

    result: str
    why: str
    here_ms: float  # predicted: to have its KV where it is decoded, computed there
    there_ms: float  # and read there
    transfer: str | None = None  # store | mooncake | nixl
    candidate: CandidateId | None = None  # None: no other replica was chosen
    cost: CandidateCost | None = None  # of that, as predicted
    predicted_ms: float | None = None
    ms: float | None = None
    num_predicted_cached_tokens: int | None = None
    num_reported_cached_tokens: int | None = None
    policy: str | None = None
    policy_params: dict[str, Any] = {}
    snapshot: Snapshot | None = None
    decision: Decision | None = None

    @property
    def is_peer_to_peer(self) -> bool:
        """Whether it was computed elsewhere, and read from there."""
        return self.result == "remote" and self.transfer != "store"

    @property
    def where(self) -> str:
        """Return the replica that computed it; else the result."""
        return self.candidate or "" if self.result == "remote" else self.result


class AssignmentRecord(Struct, frozen=True, kw_only=True):
    """A request's variant, and whether the request counts.

    `unit` is what was randomised: a session's digest (split) or a time slot (switchback). Requests
    of one unit are not independent. Requests at the beginning of a slot do not count, while caches
    and queues are still the other variant's (`wash_out`).

    `trial` identifies the experiment's definition. It is the same on all routers that read the same
    file.
    """

    experiment: str
    design: str  # split | switchback; partition in older records
    arm: str
    unit: str
    share: float  # of the traffic that the variant should get at that moment
    slot: int | None = None  # switchback: number of the time slot
    not_counted: str | None = None  # why not: wash_out; others in older records
    control: str = ""  # variant that the others are compared with; "": older record
    trial: str = ""  # "": older record

    @property
    def label(self) -> str:
        """Name the experiment and the variant."""
        return f"{self.experiment}/{self.arm}"


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """What was known, what was decided, what happened. Times in milliseconds."""

    schema: int = SCHEMA
    request_id: str
    at: float  # unix seconds, wall clock
    api: str
    model: str
    tenant: str | None = None  # its name; None: there is no tenants file
    session: str | None = None  # digest of the conversation, as the admin API names it
    policy: str
    policy_params: dict[str, Any] = {}  # with the name: the very policy, see `policies.create`
    assignment: AssignmentRecord | None = None  # None: in no experiment
    state: str  # exact | degraded | blind: how well the chosen replica's cache was known
    snapshot: Snapshot
    decision: Decision
    prefill: PrefillRecord | None = None  # None: prompts are not computed apart
    tries: tuple[Try, ...]
    outcome: str
    status: int
    num_prompt_tokens: int
    num_predicted_cached_tokens: int
    num_reported_cached_tokens: int | None
    computed: Computed | None = None  # why tokens were computed; None: not known
    num_completion_tokens: int | None
    router_ms: float  # without the time it waited
    service_class: str | None = None  # interactive | batch; None: it never waits (the queue is off)
    deadline_ms: float | None = None  # from arrival to first token, as asked; None: whenever
    expected_ttft_ms: float | None = None  # from its arrival, its wait included; None: no deadline
    expected_tbt_ms: float | None = None  # between its tokens; None: no limit, or not known
    waited_ms: float = 0.0  # in the router, for room
    waited_for: str | None = None  # last: window | room | tbt; None: nothing, or those before it
    released: str | None = None  # why it was sent (queue `Verdict`); None: it did not wait
    predicted_ttft_ms: float | None
    ttft_ms: float | None
    total_ms: float

    @property
    def by_policy(self) -> tuple[Snapshot, Decision] | None:
        """Return what the configured policy was asked, and what it chose; None: it was not asked.

        Where prompts are computed apart it places these; what answers them is `decode_load`'s.
        """
        prefill = self.prefill
        if prefill is None:
            return self.snapshot, self.decision
        if prefill.snapshot is None or prefill.decision is None:
            return None
        return prefill.snapshot, prefill.decision


class Outcome(Enum):
    """How a request ended, seen from the replica."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # 4xx: the client's fault
    CLIENT_GONE = "client_gone"  # the client left before the end
    ROUTER_FAILED = "router_failed"  # we could not send it
    REPLICA_FAILED = "replica_failed"  # 5xx, time-out, broken answer
    OVERDUE = "overdue"  # left for another, its first token being late
    POOL_OVERDUE = "pool_overdue"  # the same, of a request that had to read from the pool
    REPLICA_UNREACHABLE = "replica_unreachable"  # no connection: nothing listens

    @staticmethod
    def of_status(status: int) -> Outcome:
        """Return how a request ended that was answered with a status."""
        if status >= 500:
            return Outcome.REPLICA_FAILED
        return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK


CAUSE_WORDS: Final[dict[Cause, str]] = {
    "new": "new in this turn",
    "changed": "the prompt changed",
    "evicted": "the replica evicted them to make room for other prompts",
    "moved": "the router sent the turn to another replica",
    "cleared": "the replica's cache was emptied",
    "pool_lost": "the shared pool no longer has them",
    "fetch_failed": "the read from the shared pool failed",
    "salt_or_model": "the turn has another model, adapter or cache_salt",
    "last_block": "the rest of a block: engines share whole blocks only",
    "unknown": "the router does not know what this session had before",
}

_ADVICE: Final[dict[Cause, str]] = {
    "evicted": "Add replicas or KV cache, or run fewer agents at a time.",
    "moved": "Nothing to do: the router expected the first token sooner there.",
    "cleared": "Nothing to do: a restart, a sleep or a reset empties the cache.",
    "pool_lost": "The pool is too small for all sessions: give it more memory.",
    "fetch_failed": "See the engine's log for errors of its KV connector.",
    "salt_or_model": "Keep cache_salt and model the same within a session.",
    "unknown": "The session began before the router did, was silent for too long, or its tokens "
    "are not known here (`warmroute check`).",
}
_LEFT: Final = "See `warmroute replicas list` for why the replica could not be used."

_CHANGES: Final[dict[Part, tuple[str, str]]] = {
    "tools": ("the tools changed", "Send the same tools in every request of a session."),
    "tool_order": (
        "the same tools came in another order",
        "Sort the tools by name before sending them.",
    ),
    "system": (
        "the system prompt changed",
        "Move what changes (a time, an id) into the last message.",
    ),
    "later_system": (
        "the client adds a system message to each turn, and the chat template moves it to the "
        "front",
        'Send system messages in front only. Claude Code: "totalTokensReminder": "off" in its '
        "settings. Or set forward.later_system_as_user.",
    ),
    "message": ("an earlier message changed", "Append to the history; do not edit it."),
    "compacted": (
        "the history was compacted",
        "Nothing to do: the shorter history is computed once.",
    ),
    "template": (
        "the chat template writes earlier messages differently now",
        "Usual for reasoning models, whose templates drop earlier reasoning.",
    ),
    "text": ("the prompt changed", "Keep the beginning of prompts the same."),
}


_END: Final = 0.1
"""Share of a prompt that is its end: computing it again costs little."""
_ONLY_THE_END: Final = "Nothing to do: only the end of the prompt changed."

LEAST_IN_ROW: Final = 3
"""Turns in a row in which a part changes, before that is worth a word."""


class Reason(Struct, frozen=True, kw_only=True):
    """Why tokens of several turns were computed.

    part: Where the prompts changed, for the cause `changed`.
    num_turns: That have it.
    """

    cause: Cause
    part: Part | None
    num_tokens: int
    num_turns: int
    text: str
    advice: str


def causes_in_words(computed: Computed) -> list[str]:
    """Describe each cause but `new` in one line, the largest first."""
    causes = sorted(computed.tokens.items(), key=lambda pair: -pair[1])
    return [_line(cause, num, computed) for cause, num in causes if cause != "new"]


def change_in_words(part: Part) -> str:
    """Describe a change of a part."""
    return _CHANGES[part][0]


def advice_on(part: Part) -> str:
    """Return what can be done about changes of a part."""
    return _CHANGES[part][1]


def advice_for(cause: Cause, computed: Computed | None = None) -> str:
    """Return what can be done about a cause, here in a turn; "": nothing."""
    if computed is None:
        return _ADVICE.get(cause, "")
    change, move = computed.change, computed.move
    if cause == "changed" and change is not None:
        num_changed = computed.tokens.get("changed", 0)
        if num_changed <= _END * (change.offset + num_changed):
            return _ONLY_THE_END
        return _CHANGES[change.part][1]
    if cause == "moved" and move is not None and move.has_left:
        return _LEFT
    return _ADVICE.get(cause, "")


def advice_in_words(computed: Computed) -> list[str]:
    """Return what can be done about the causes of a turn, each advice once."""
    every = (advice_for(cause, computed) for cause in computed.tokens)
    return list(dict.fromkeys(filter(None, every)))


def reasons(every: Iterable[Computed | None], signs: Mapping[Part, str]) -> list[Reason]:
    """Sum the causes of a session's turns, the largest first; `new` and `last_block` are left out.

    Args:
        every: What was computed in each turn.
        signs: What changes in a part in every turn, as far as that was found.
    """
    sums: dict[tuple[Cause, Part | None], tuple[int, int, Computed]] = {}
    in_row: dict[Part, int] = {}
    for computed in every:
        if computed is None:
            continue
        if (change := computed.change) is not None:
            in_row[change.part] = max(change.num_in_row, in_row.get(change.part, 0))
        for cause, num in computed.tokens.items():
            if cause not in ("new", "last_block"):
                key = cause, change.part if change and cause == "changed" else None
                num_tokens, num_turns, _ = sums.get(key, (0, 0, computed))
                sums[key] = num_tokens + num, num_turns + 1, computed
    said = []
    for (cause, part), (num_tokens, num_turns, last) in sums.items():
        what = CAUSE_WORDS[cause] if part is None else _CHANGES[part][0]
        if part is not None and in_row.get(part, 0) >= LEAST_IN_ROW:
            what = signs.get(part, what)
        turns = "1 turn" if num_turns == 1 else f"{num_turns:,} turns"
        said.append(
            Reason(
                cause=cause,
                part=part,
                num_tokens=num_tokens,
                num_turns=num_turns,
                text=f"{num_tokens:,} tokens in {turns}: {what}",
                advice=advice_for(cause, last),
            )
        )
    return sorted(said, key=lambda reason: -reason.num_tokens)


def _line(cause: Cause, num_tokens: int, computed: Computed) -> str:
    tell = _TELL.get(cause)
    what = tell(computed) if tell is not None else CAUSE_WORDS[cause]
    return f"{num_tokens:,} tokens: {what}"


def _changed(computed: Computed) -> str:
    change = computed.change
    if change is None:
        return CAUSE_WORDS["changed"]
    what = _CHANGES[change.part][0]
    where = f", messages[{change.index}]" if change.index is not None else ""
    often = f", in {change.num_in_row} turns in a row" if change.num_in_row > 1 else ""
    return f"{what} at token {change.offset:,}{where}{often}"


def _moved(computed: Computed) -> str:
    move = computed.move
    if move is None:
        return CAUSE_WORDS["moved"]
    if move.has_left:
        return f"replica {move.origin}, which has them, could not be used"
    if move.ttft_here_ms is None or move.ttft_there_ms is None:
        return f"the router moved the session away from replica {move.origin}"
    return (
        f"the router moved the session away from replica {move.origin}: it expected the first "
        f"token after {move.ttft_here_ms:,.0f} ms here, after {move.ttft_there_ms:,.0f} ms there"
    )


def _lost(computed: Computed) -> str:
    loss = computed.loss
    if loss is None:
        return CAUSE_WORDS["evicted"]
    when = f" {loss.ago_s:,.1f} s before" if loss.ago_s is not None else ""
    return (
        f"replica {loss.replica} evicted them{when}; it computed {loss.num_between_tokens:,} other "
        f"tokens in the {loss.since_s:,.1f} s since the last turn"
    )


def _cleared(computed: Computed) -> str:
    if computed.loss is None:
        return CAUSE_WORDS["cleared"]
    return f"the cache of replica {computed.loss.replica} was emptied"


_TELL: Final[dict[Cause, Callable[[Computed], str]]] = {
    "changed": _changed,
    "moved": _moved,
    "evicted": _lost,
    "cleared": _cleared,
}
