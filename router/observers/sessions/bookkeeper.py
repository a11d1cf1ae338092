"""Book each answered request: why its tokens were computed, and what its session cost.

Each computed token has one cause, from what was known when the request was placed. Tokens
differ by position. From the first one that the engine computed:

    cached by the engine
    fetch_failed, moved, pool_lost, then what became of the rest    an earlier prompt had these, and
                                                                    engines could have shared them
    last_block, changed, new

An earlier prompt below one block had nothing that engines share: its tokens are `last_block`.

What is noticed meanwhile is said once. Prompts that change near their beginning in every turn are
named with what probably changes. Sessions without names are found by prompts that go on from each
other: gateways drop headers that they do not know, or set one that is another in each request.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import orjson
from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from policies.view import CandidateId
from router.api.digests import SYSTEM_ROLES, PartDigests
from router.api.sessions import SessionHeaders, engine_name, session_hash, session_of
from router.base.bounded import Bounded
from router.base.contracts import BlockKey, HashContract
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.observers.sessions.session_ledger import Match, Session, SessionLedger, Thread
from router.observers.sessions.turns import Turn, turn_of
from router.records.record import (
    LEAST_IN_ROW,
    Cause,
    Change,
    Computed,
    Loss,
    Move,
    Part,
    advice_on,
    change_in_words,
)
from router.request.fetch import Fetches
from router.request.observer import Facts, Observer
from router.request.results import Inbound, Placement, Prompt, Read

logger = logging.getLogger(__name__)


_EARLY: Final[tuple[Part, ...]] = ("tools", "tool_order", "system", "later_system")
_MAX_FINDINGS: Final = 100
_MAX_BYTES: Final = 1 << 20  # of a body that is looked at once more: 3 ms
_FIELDS: Final = ("system", "instructions", "messages", "input")

Hint = Literal["time", "date", "id", "order", "unknown"]

_SIGNS: Final[tuple[tuple[Hint, re.Pattern[str]], ...]] = (
    ("time", re.compile(r"\b\d{1,2}:\d{2}(?::\d{2})?\b|\b1[6-9]\d{8}\b")),
    ("id", re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")),
    ("date", re.compile(r"\b\d{4}-\d{2}-\d{2}\b")),
)


class SessionFinding(Struct, kw_only=True):
    """A part that changes in every turn of some sessions.

    num_again: Tokens that were computed again for it, of all turns since it was found.
    session: The last one, 16 hex digits.
    """

    tenant: str | None
    part: Part
    hint: Hint
    offset: int
    session: str
    num_sessions: int = 1
    num_turns: int = 0
    num_again: int = 0

    @property
    def what(self) -> str:
        """Return what changes, in words."""
        return _CAUSES[self.part, self.hint]

    @property
    def text(self) -> str:
        """Return the finding in words for the agent's user, with what to do."""
        each = f"{self.num_again // max(1, self.num_turns):,} tokens are computed again each time"
        so_far = f", {self.num_again:,} so far" if self.num_turns > 1 else ""
        return f"{self.what}: {each}{so_far}. {advice_on(self.part)}"


_WHAT: Final[dict[Hint, str]] = {
    "time": "the system prompt contains a time of day and changes in every turn",
    "id": "the system prompt contains a random id and changes in every turn",
    "date": "the system prompt contains a date and changes in every turn",
    "order": "the same tools come in another order in every turn",
    "unknown": "the system prompt changes in every turn",
}
_TOOLS: Final = "the tools change in every turn"
_CAUSES: Final[dict[tuple[Part, Hint], str]] = {
    **{("system", hint): text for hint, text in _WHAT.items()},
    **{("tools", hint): _TOOLS for hint in _WHAT},
    **{("later_system", hint): change_in_words("later_system") for hint in _WHAT},
    **{("tool_order", hint): _WHAT["order"] for hint in _WHAT},
}


class Findings:
    """What was found, by tenant and part; the oldest goes first."""

    def __init__(self) -> None:
        self._found: Bounded[tuple[str | None, Part], SessionFinding] = Bounded(_MAX_FINDINGS)

    def __iter__(self) -> Any:
        """Yield the findings, the newest first."""
        return reversed(self._found.values())

    def note(
        self,
        change: Change,
        num_again: int,
        *,
        tenant: str | None,
        session: str,
        body: bytes | None,
    ) -> SessionFinding | None:
        """Record a change; return the finding if it is a new one."""
        if change.part not in _EARLY or change.num_in_row < LEAST_IN_ROW:
            return None
        key = tenant, change.part
        finding, is_new = self._found.get(key), False
        if finding is None:
            is_new = True
            finding = SessionFinding(
                tenant=tenant,
                part=change.part,
                hint=_hint(change.part, body),
                offset=change.offset,
                session=session,
            )
            self._found.put(key, finding)
        elif finding.session != session and change.num_in_row == LEAST_IN_ROW:
            finding.num_sessions += 1
        finding.session = session
        finding.num_turns += 1
        finding.num_again += num_again
        if not is_new:
            return None
        logger.warning(
            "a prompt changes near its beginning in every turn",
            extra={"tenant": tenant, "session": session, "what": finding.text},
        )
        return finding


def _hint(part: Part, body: bytes | None) -> Hint:
    """Guess what changes from known signs. Nothing of the text is kept."""
    if part == "tool_order":
        return "order"
    if part != "system" or body is None or len(body) > _MAX_BYTES:
        return "unknown"
    try:
        text = _system_text(orjson.loads(body))
    except (ValueError, TypeError, AttributeError):
        return "unknown"
    return next((hint for hint, sign in _SIGNS if sign.search(text)), "unknown")


def _system_text(body: Mapping[str, Any]) -> str:
    texts = []
    for field in _FIELDS:
        value = body.get(field)
        if field in ("messages", "input"):
            items = value if isinstance(value, list) else []
            value = [item for item in items if item.get("role") in SYSTEM_ROLES]
        texts.append(orjson.dumps(value).decode())
    return "\n".join(texts)


WINDOW: Final = 100
"""Prompts that are judged together."""

PART: Final = "session_names"
"""Stands in a list of findings where others have the part of a prompt."""

_LEAST_SHARE: Final = 0.5

Problem = Literal["none", "changing"]
"""No prompt names a session; or each names another one, although it goes on an earlier prompt."""

_UNNAMED: Final[dict[Problem, str]] = {
    "none": "no client names its session",
    "changing": "clients name another session in each request",
}
_NAMING: Final[dict[Problem, str]] = {
    "none": "Have the gateway pass on or set a header, such as X-Session-ID, that stays the same "
    "during a conversation.",
    "changing": "Have the gateway keep the header of the session (such as X-Correlation-ID) the "
    "same during a conversation, or read only others: --set session.known_headers=false "
    "--set session.headers=X-Session-ID.",
}
_ADDS: Final = (
    "Prompts go to their cache without names, too. With names, conversations with the same "
    "beginning are distinguished, and one that ends makes room at once."
)


class Unnamed(Struct, frozen=True, kw_only=True):
    """What is wrong with the names of the last prompts; `num_going_on` of them go on others."""

    problem: Problem
    num_going_on: int

    @property
    def text(self) -> str:
        """Write it for the operator of the gateway, with what to do."""
        problem, share = self.problem, f"{self.num_going_on} of the last {WINDOW} prompts"
        return f"{_UNNAMED[problem]}, although {share} go on others. {_NAMING[problem]} {_ADDS}"

    @property
    def row(self) -> dict[str, Any]:
        """Describe it as one of the findings."""
        return {"tenant": None, "session": None, "part": PART, "text": self.text}


class SessionNames:
    """Counts the names of prompts, in windows of `WINDOW`."""

    def __init__(self) -> None:
        self.found: Unnamed | None = None
        """What the last whole window showed; None: all is well, or there was none."""
        self._said: set[Problem] = set()
        self._num_prompts = 0
        self._num_named = 0
        self._num_unnamed_going_on = 0
        self._num_renamed = 0

    def note(self, match: Match, parts: PartDigests | None, *, is_named: bool) -> None:
        """Count a prompt of a session.

        Args:
            match: What was there of it.
            parts: Of the prompt; None: it is no chat.
            is_named: Whether its client named the session.
        """
        self._num_prompts += 1
        self._num_named += is_named
        if parts is None or parts.has_answers:
            if not is_named:
                self._num_unnamed_going_on += match.thread is not None
            elif parts is not None and match.thread is None and match.source is not None:
                self._num_renamed += 1
        if self._num_prompts >= WINDOW:
            self._judge()

    def _judge(self) -> None:
        """Judge a window, and begin another."""
        least = _LEAST_SHARE * self._num_prompts
        self.found = None
        if not self._num_named and self._num_unnamed_going_on > least:
            self.found = Unnamed(problem="none", num_going_on=self._num_unnamed_going_on)
        elif self._num_renamed > least:
            self.found = Unnamed(problem="changing", num_going_on=self._num_renamed)
        self._num_prompts = self._num_named = 0
        self._num_unnamed_going_on = self._num_renamed = 0
        if self.found is not None and self.found.problem not in self._said:
            self._said.add(self.found.problem)
            logger.warning(
                "prompts go on from each other without names", extra={"what": self.found.text}
            )


MAX_CHARS: Final = 80
_MAX_ID_BYTES: Final = 1 << 20  # of a body that is parsed once more: 3 ms


class SessionTitles:
    """Finds what clients call their sessions; `read` has the headers that may say it."""

    def __init__(self, read: SessionHeaders) -> None:
        self._headers = read

    def note(self, session: Session | None, read: Read) -> None:
        """Keep the id of a session that has none yet."""
        if session is None or session.title is not None or not read.whose.is_named:
            return
        found = self._in_headers(session, read.inbound) or self._in_body(session, read.inbound)
        session.title = _shown(found) if found is not None else ""

    def _in_headers(self, session: Session, inbound: Inbound) -> str | None:
        return self._named(session, inbound, None)

    def _in_body(self, session: Session, inbound: Inbound) -> str | None:
        if inbound.body is None or len(inbound.body) > _MAX_ID_BYTES:
            return None
        try:
            body = orjson.loads(inbound.body)
        except orjson.JSONDecodeError:
            return None
        return self._named(session, inbound, body) if isinstance(body, dict) else None

    def _named(self, session: Session, inbound: Inbound, body: dict[str, Any] | None) -> str | None:
        """Return the id if it is this session's."""
        found = session_of(inbound.headers, body, self._headers, inbound.path)
        if found is None or not found.is_named:
            return None
        is_it = session_hash(found.name, inbound.caller.owner) == session.key
        return found.name if is_it else None


def _shown(name: str) -> str:
    """Write an id in one line; a sub-agent's has a slash in front of its own part."""
    text = "".join(sign if sign.isprintable() else "?" for sign in name.replace("\0", "/"))
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"


Fate = Literal["evicted", "cleared", "unknown"]


class KnownPrompt(Struct, frozen=True, kw_only=True):
    """What is known of a prompt, in tokens from its beginning.

    num_tokens, num_cached: Of the prompt, as the engine reports.
    num_common: That an earlier prompt had, too, in whole blocks.
    num_before: Of the whole earlier prompt of the same thread; 0: there is none.
    has_changed: The earlier prompt had another block behind the common ones.
    is_apart: The earlier prompt's blocks are of another salt, model or adapter.
    is_unknown: It is not known what the conversation had.
    step: A hit is a multiple of so many tokens.
    num_dropped: Of each hit, so many tokens are computed again (EAGLE, MTP).
    fetch_until: Predicted to come from the pool, up to there.
    moved_until: The replica of the turn before has it, up to there.
    pool_until: The pool had it, up to there.
    fate: What became of the rest that is not there.
    """

    num_tokens: int
    num_cached: int
    num_common: int = 0
    num_before: int = 0
    has_changed: bool = False
    is_apart: bool = False
    is_unknown: bool = False
    step: int = 1
    num_dropped: int = 0
    fetch_until: int = 0
    moved_until: int = 0
    pool_until: int = 0
    fate: Fate = "unknown"


def causes_of(known: KnownPrompt) -> dict[Cause, int]:
    """Split the tokens that an engine computed by cause; the sum is its own count."""
    num_before = known.num_before
    if known.is_unknown and not num_before:
        num_before = known.num_tokens
    had_blocks = min(num_before, known.num_tokens - 1) >= known.step
    causes: list[tuple[Cause, int]]  # each up to a position, in this order
    if known.is_unknown:
        causes = [("unknown" if had_blocks else "last_block", num_before)]
    elif known.is_apart:
        causes = [("salt_or_model" if had_blocks else "last_block", num_before)]
    else:
        shared = sharable(known)
        causes = [
            ("fetch_failed", min(known.fetch_until, shared)),
            ("moved", min(known.moved_until, shared)),
            ("pool_lost", min(known.pool_until, shared)),
            (known.fate, shared),
            ("last_block", known.num_common),
            ("changed" if known.has_changed and had_blocks else "last_block", num_before),
        ]
    taken: dict[Cause, int] = {}
    at = known.num_cached
    for cause, until in (*causes, ("new", known.num_tokens)):
        end = min(until, known.num_tokens)
        if end > at:
            taken[cause] = taken.get(cause, 0) + end - at
            at = end
    return taken


def sharable(known: KnownPrompt) -> int:
    """Count the leading tokens that an engine can take from a cache at most.

    They are those of whole blocks. Engines compute the last token.
    """
    num_common = min(known.num_common, known.num_tokens - 1)
    return max(0, num_common // known.step * known.step - known.num_dropped)


_Named = tuple[int, HashContract | None, Sequence[BlockKey]]
"""What a prompt's blocks are called where it was placed: see `Thread`."""


class LedgerEntry(Struct, frozen=True, kw_only=True):
    """An answered request that is to be booked.

    conversation: The digest of its session's name, or of its first block.
    turn: Without its causes.
    has_causes: The engine says how much of the prompt it computed here.
    has_failed_read: It was sent under a salt of its own, since it failed to fetch blocks.
    """

    conversation: int
    prompt: Prompt
    placement: Placement
    match: Match
    thread: Thread
    turn: Turn
    has_causes: bool
    has_failed_read: bool


class Bookkeeper(Observer):
    """Tells the causes of computed tokens, and adds up what sessions cost."""

    def __init__(
        self,
        ledger: SessionLedger,
        *,
        caches: CacheView,
        fetches: Fetches | None,
        findings: Findings,
        names: SessionNames,
        metrics: Metrics,
        titles: SessionTitles | None = None,
    ) -> None:
        self.ledger = ledger
        self._titles = titles
        self._caches = caches
        self._fetches = fetches
        self._findings = findings
        self._names = names
        self._metrics = metrics

    def ended(self, facts: Facts) -> None:
        """Remember the prompt of a request that was answered.

        Completions without a session's name are of one conversation if their first block is the
        same; in it they are threads.
        """
        placement = facts.placement
        if not facts.is_answered or placement is None:
            return
        prompt = facts.prompt.original or facts.prompt
        has_failed_read = prompt is not facts.prompt
        tries, whose = facts.tries, prompt.read.whose
        if prompt.read.request is None or prompt.read.num_prompts > 1:
            return
        named = _named(prompt, placement, self._caches)
        conversation = whose.conversation if whose.conversation is not None else _unnamed(named)
        match = self._match(conversation, prompt, named)
        if not has_failed_read:
            self._names.note(match, whose.parts, is_named=whose.is_named)
        turn = turn_of(facts, prompt, placement)
        num_computed = max(0, turn.num_tokens - (turn.num_cached or 0)) + (turn.num_output or 0)
        thread = self._thread(prompt, placement, match, named, facts.ended_s)
        if match.thread is None or not has_failed_read:  # else no cache has its blocks
            self.ledger.remember(
                conversation,
                whose.parent,
                thread,
                num_computed=num_computed,
                tenant=prompt.read.inbound.caller.name,
                routing=whose.session_hash,
                replaces=match.thread,
            )
        if self._titles is not None:
            self._titles.note(self.ledger.get(conversation), prompt.read)
        facts.read.inbound.slots[self] = LedgerEntry(
            conversation=conversation,
            prompt=prompt,
            placement=placement,
            match=match,
            thread=thread,
            turn=turn,
            has_causes=turn.num_cached is not None
            and (tries.helped is None or not tries.helped.is_peer_to_peer),
            has_failed_read=has_failed_read,
        )

    def settled(self, facts: Facts) -> None:
        """Book a turn, with the causes if its engine said enough."""
        entry = facts.read.inbound.slots.pop(self, None)
        if entry is None:
            return
        turn = entry.turn
        entry.thread.num_emptied = self._caches.index.num_emptied(entry.thread.candidate)
        if entry.has_causes:
            computed = self._computed(entry)
            turn = replace(turn, computed=computed)
            self._count(entry, computed)
        self.ledger.add(entry.conversation, turn)
        facts.notes["computed"] = turn.computed

    def _match(self, conversation: int, prompt: Prompt, named: _Named) -> Match:
        whose, (space, contract, keys) = prompt.read.whose, named
        if prompt.read.response_id is not None:
            return Match(is_unknown=True)  # its engine has the conversation's beginning
        return self.ledger.match(
            conversation,
            whose.parent,
            space=space,
            keys=keys,
            contract=contract,
            num_tokens=prompt.num_tokens,
            parts=whose.parts,
            tenant=prompt.read.inbound.caller.name,
        )

    def _thread(
        self, prompt: Prompt, placement: Placement, match: Match, named: _Named, at_s: float
    ) -> Thread:
        candidate = placement.lease.candidate
        there, change = placement.plan.fetchable, match.change
        space, contract, keys = named
        return Thread(
            space=space,
            contract=contract,
            keys=keys,
            num_tokens=prompt.num_tokens,
            parts=prompt.read.whose.parts if prompt.read.response_id is None else None,
            candidate=candidate,
            num_emptied=self._caches.index.num_emptied(candidate),
            at_s=at_s,
            num_pool_tokens=there.num_tokens if there is not None else 0,
            change=change.part if change is not None else None,
            num_in_row=change.num_in_row if change is not None else 0,
        )

    def _computed(self, entry: LedgerEntry) -> Computed:
        prompt, placement, match = entry.prompt, entry.placement, entry.match
        num_cached = entry.turn.num_cached or 0
        thread, source = match.thread, match.source
        candidate = placement.lease.candidate
        index, contract = self._caches.index, entry.thread.contract
        size = contract.block_size if contract is not None else 1
        layout = index.groups_of(candidate)
        fetch_until = 0
        if entry.has_failed_read:
            fetch_until = match.num_common
        elif placement.predicted.num_fetched_tokens:
            fetch_until = placement.predicted.num_cached_tokens
        known = KnownPrompt(
            num_tokens=entry.turn.num_tokens,
            num_cached=num_cached,
            num_common=match.num_common,
            num_before=thread.num_tokens if thread is not None else 0,
            has_changed=match.change is not None,
            is_apart=thread is not None and thread.space != entry.thread.space,
            is_unknown=match.is_unknown,
            step=size if layout is None else max(1, layout.alignment * layout.unit),
            num_dropped=size if candidate in index.dropping else 0,
            fetch_until=fetch_until,
        )
        loss = move = None
        if source is not None and num_cached < sharable(known):
            known, loss = self._with_fate(prompt, placement, known, source, size)
        if thread is not None and thread.candidate != candidate:
            move = _move(placement, thread.candidate)
        tokens = causes_of(known)
        return Computed(
            tokens=tokens,
            num_before=match.num_common,
            change=match.change,
            move=move,
            loss=loss if known.fate in tokens else None,
        )

    def _with_fate(
        self, prompt: Prompt, placement: Placement, known: KnownPrompt, source: Thread, size: int
    ) -> tuple[KnownPrompt, Loss | None]:
        """Find what became of blocks that were there after the turn before."""
        index, home = self._caches.index, source.candidate
        views = {view.id: view for view in placement.plan.snapshot.replicas}
        is_cleared = source.num_emptied != index.num_emptied(home)
        is_here, moved_until = home == placement.lease.candidate, 0
        if not is_here and not is_cleared:
            moved_until = views[home].num_own_tokens if home in views else known.num_common
        known = self._with_pool(placement, known, source)
        lost_at = max(known.num_cached, moved_until) // size
        contract = source.contract
        keys = prompt.keys(contract) if contract is not None else ()
        key = keys[lost_at] if lost_at < len(keys) else None
        evicted_s = index.evicted_s(home, key) if key is not None else None
        if evicted_s is not None and evicted_s < source.at_s:
            evicted_s = None  # it was computed again since
        fate: Fate = "unknown"
        if evicted_s is not None:
            fate = "evicted"  # first: it had them after it was emptied, or never was
        elif is_cleared:
            fate = "cleared"
        elif is_here and known.num_cached + known.step >= sharable(known):
            known = replace(known, num_dropped=known.step)  # it drafts, or has sliding windows
        elif home in views and views[home].num_own_tokens <= lost_at * size:
            is_exact = self._caches.state(home, prompt.extra) == "exact"
            fate = "evicted" if is_exact else "unknown"
        loss = None
        if fate != "unknown":
            at_s = placement.placed_s
            loss = Loss(
                replica=home,
                since_s=round(at_s - source.at_s, 3),
                num_between_tokens=self.ledger.num_computed[home] - source.num_computed,
                ago_s=None if evicted_s is None else round(max(0.0, at_s - evicted_s), 3),
            )
        return replace(known, moved_until=moved_until, fate=fate), loss

    def _with_pool(self, placement: Placement, known: KnownPrompt, source: Thread) -> KnownPrompt:
        """Find what the pool had. What it lost since it was asked is no read that failed."""
        there, num_cached = placement.plan.fetchable, known.num_cached
        pool_until, fetch_until = source.num_pool_tokens, known.fetch_until
        if there is not None and there.num_tokens >= pool_until:
            pool_until = 0
        if there is not None and self._fetches is not None:
            num_lost = self._fetches.num_lost_tokens(there, num_cached, source.at_s)
            if num_lost:
                pool_until, fetch_until = max(pool_until, num_cached + num_lost), 0
        return replace(known, pool_until=pool_until, fetch_until=fetch_until)

    def _count(self, entry: LedgerEntry, computed: Computed) -> None:
        prompt, by_cause = entry.prompt, self._metrics.prompt_tokens
        by_cause.labels("cached").inc(entry.turn.num_cached or 0)
        for cause, num_tokens in computed.tokens.items():
            by_cause.labels(cause).inc(num_tokens)
        if computed.change is None:
            return
        self._findings.note(
            computed.change,
            computed.tokens.get("changed", 0),
            tenant=prompt.read.inbound.caller.name,
            session=engine_name(entry.conversation),
            body=prompt.read.inbound.body,
        )


def _named(prompt: Prompt, placement: Placement, caches: CacheView) -> _Named:
    contract = caches.contract(placement.lease.candidate)
    is_known = prompt.tokens is not None and contract is not None
    keys = prompt.keys(contract) if contract is not None and is_known else ()
    return _space(prompt, placement), contract, keys


def _unnamed(named: _Named) -> int:
    space, _, keys = named
    return _digest(f"{space}\0{keys[0] if keys else ''}")


def _space(prompt: Prompt, placement: Placement) -> int:
    """Return a digest of what else names blocks: salt, adapter and base model."""
    base, extra = placement.candidate.base_model or prompt.read.model, prompt.extra
    if extra.cache_salt is None:
        return _unsalted_space(base, extra.lora)
    return _digest(f"{base}\0{extra.lora}\0{extra.cache_salt}")


@lru_cache(maxsize=256)
def _unsalted_space(base: str | None, lora: tuple[str, str] | None) -> int:
    return _digest(f"{base}\0{lora}\0")


def _digest(name: str) -> int:
    return xxh3_64_intdigest(name.encode(errors="surrogatepass"))


def _move(placement: Placement, origin: CandidateId) -> Move:
    costs = {cost.id: cost.ttft_ms for cost in placement.plan.costs()}
    return Move(
        origin=origin,
        ttft_here_ms=_rounded(costs.get(placement.lease.candidate)),
        ttft_there_ms=_rounded(costs.get(origin)),
        has_left=origin not in {view.id for view in placement.plan.snapshot.replicas},
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
