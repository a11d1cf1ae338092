"""Observers: what only watches requests.

The path (`router.request.story`) answers a request without any of them. It tells them what happens
through the methods of `Observer`, and names none of them. An observer never fails, delays or alters
a request: what it raises is counted and logged once, and its methods must not wait.

    read          the content is parsed; it is dropped soon
    leased        a try has its place: its load and its blocks count
    sent          a try is about to be sent; headers for the engine may be added
    first_token   the first token of a stream has come
    listen        an answer begins: return what takes its bytes
    released      a try has given its place back
    failed        a try has failed, and another one may follow
    ended         the request has ended: it was answered, it failed, or its client left
    settled       the events of its answer have come, or are overdue
    recorded      its decision record is complete
    refused       the router answered it with an error, or its client left before it was placed
    counted       the router answered it with the number of its prompt's tokens

`leased` and `released` come for each lease. A request has several if it was tried again, or if its
prompt is computed at another replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Final, Generic, ParamSpec

from msgspec import Struct
from multidict import CIMultiDict

from router.api.answers import Usage
from router.base.supervisor import described
from router.metrics import Metrics
from router.records.record import DecisionRecord, Outcome
from router.request.results import Passage, Placement, Plan, Prompt, Read, Sent, Tries

logger = logging.getLogger(__name__)


class Facts(Struct, frozen=True, kw_only=True):
    """What became of a request. All times but `at` are monotonic.

    read: What the request says (`prompt.read`).
    plan: The decision in force; of a request that left the queue, where it would have gone.
    placement: None: its client left while it waited.
    sent: The answer. None: there was none.
    first_s: When its first token or byte came. None: none did.
    ttft_ms: From its place to its first token; of streams that were answered.
    router_ms: In the router until it was sent, without the queue.
    total_ms: From its arrival to its end.
    is_answered: It had an answer, with status 200.
    num_predicted_cached_tokens: Of its prompt, what the engine was predicted to reuse.
    num_reported_cached_tokens: What the engine says that it reused. None: it does not say.
    at: Unix time of its end.
    notes: What observers add: `trace` is shown in the log, `computed` is put into the record.
    """

    prompt: Prompt
    read: Read
    tries: Tries
    plan: Plan
    placement: Placement | None
    state: str
    status: int
    outcome: Outcome
    sent: Sent | None = None
    usage: Usage | None = None
    first_s: float | None = None
    ttft_ms: float | None = None
    router_ms: float
    total_ms: float
    is_answered: bool = False
    num_predicted_cached_tokens: int
    num_reported_cached_tokens: int | None = None
    placed_s: float
    ended_s: float
    at: float
    notes: dict[str, Any] = {}


class Observer:
    """Watches requests. Override what you need; what is not overridden costs nothing."""

    def read(self, read: Read) -> None:
        """Receive what a request says, while its parsed content is there."""

    def leased(self, prompt: Prompt, placement: Placement) -> None:
        """Receive a decision that is in force from now on."""

    def sent(self, prompt: Prompt, placement: Placement, headers: CIMultiDict[str]) -> None:
        """Receive a try that is about to be sent; `headers` are the engine's."""

    def first_token(self, placement: Placement, at_s: float) -> None:
        """Receive the time of a first token, monotonic."""

    def listen(self, passage: Passage) -> Callable[[bytes], None] | None:
        """Return what takes the bytes of an answer, which it cannot alter. None: nothing does."""

    def released(self, placement: Placement, outcome: Outcome) -> None:
        """Receive the end of a lease."""

    def failed(self, prompt: Prompt, placement: Placement, failure: str) -> None:
        """Receive the failure of a try; `failure` is of a small closed set."""

    def refused(self, request_id: str, code: str) -> None:
        """Receive a request that the router answered with an error; `code` as in `errors`.

        Or one whose client left before a replica was chosen; `code` is then `client_gone`.
        """

    def counted(self, read: Read, num_tokens: int) -> None:
        """Receive a request that the router answered with the number of its prompt's tokens."""

    def ended(self, facts: Facts) -> None:
        """Receive what became of a request. It may add to `facts.notes`."""

    def settled(self, facts: Facts) -> None:
        """Receive a request whose block events have come, or are overdue.

        Only of requests for which `ended` was called. It may add to `facts.notes`.
        """

    def recorded(self, record: DecisionRecord) -> None:
        """Receive the decision record of a request that has settled."""

    def close(self) -> None:
        """End: the router stops, and no request follows. This may wait for a moment."""


_P = ParamSpec("_P")


class Calls(Generic[_P]):
    """One method of all observers that override it; false if none does."""

    __slots__ = ("_base", "_methods", "_observers")

    def __init__(
        self,
        base: Callable[Concatenate[Any, _P], object],
        observers: Observers,
    ) -> None:
        self._base = base
        self._methods: list[Callable[_P, object]] = []
        self._observers = observers

    def add(self, observer: Observer) -> None:
        """Call an observer, too, if it overrides the method."""
        name = self._base.__name__
        if getattr(type(observer), name) is not self._base:
            self._methods.append(getattr(observer, name))

    def __bool__(self) -> bool:
        return bool(self._methods)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        for method in self._methods:
            try:
                method(*args, **kwargs)
            except Exception as exc:
                self._observers.raised(method, exc)


class Observers:
    """All observers, called one after the other in their order.

    Args:
        metrics: Count what observers raise, by the name of their class. None: it is only logged.
    """

    def __init__(self, observers: Iterable[Observer] = (), metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self._logged: set[str] = set()
        self.read = Calls(Observer.read, self)
        self.leased = Calls(Observer.leased, self)
        self.sent = Calls(Observer.sent, self)
        self.first_token = Calls(Observer.first_token, self)
        self.released = Calls(Observer.released, self)
        self.failed = Calls(Observer.failed, self)
        self.refused = Calls(Observer.refused, self)
        self.counted = Calls(Observer.counted, self)
        self.ended = Calls(Observer.ended, self)
        self.settled = Calls(Observer.settled, self)
        self.recorded = Calls(Observer.recorded, self)
        self._all: list[Observer] = []
        self._listening: list[Observer] = []
        for each in observers:
            self.add(each)

    def add(self, observer: Observer) -> None:
        """Add an observer behind the others; before the first request."""
        self._all.append(observer)
        for calls in vars(self).values():
            if isinstance(calls, Calls):
                calls.add(observer)
        if type(observer).listen is not Observer.listen:
            self._listening.append(observer)

    def close(self) -> None:
        """Close all, the last one first: what an observer adds late reaches those before it."""
        for observer in reversed(self._all):
            try:
                observer.close()
            except Exception as exc:
                self.raised(observer.close, exc)

    def listeners(self, passage: Passage) -> list[Callable[[bytes], None]]:
        """Return what takes the bytes of an answer."""
        found = []
        for observer in self._listening:
            try:
                take = observer.listen(passage)
            except Exception as exc:
                self.raised(observer.listen, exc)
            else:
                if take is not None:
                    found.append(self._guarded(observer, take))
        return found

    def _guarded(
        self, observer: Observer, take: Callable[[bytes], None]
    ) -> Callable[[bytes], None]:
        """Return what takes an answer's bytes until it raises."""
        has_failed = False

        def listen(chunk: bytes) -> None:
            nonlocal has_failed
            if not has_failed:
                try:
                    take(chunk)
                except Exception as exc:
                    has_failed = True
                    self.raised(observer.listen, exc)

        return listen

    def raised(self, method: object, exc: Exception) -> None:
        """Count what an observer raised, and log it the first time."""
        name = type(getattr(method, "__self__", method)).__name__
        if self._metrics is not None:
            self._metrics.observer_failures.labels(name).inc()
        if name not in self._logged:
            self._logged.add(name)
            called = getattr(method, "__name__", "")
            fields = {"observer": name, "method": called, "reason": described(exc)}
            logger.error("an observer failed; requests go on", extra=fields)


NO_OBSERVERS: Final = Observers()
