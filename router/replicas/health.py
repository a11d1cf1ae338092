"""Whether a replica is fit for requests, from probes and from the outcomes of requests.

    state       offered                      left by
    UP          yes                          failures -> SUSPECT; connection refused -> DOWN
    SUSPECT     no; yes in a panic           opened by requests: time -> TRIAL
                                             opened by probes: probe ok -> UP (slow start)
    DOWN        no                           opened by requests: time or probe ok -> TRIAL
                                             opened by probes: probe ok -> UP (slow start)
    STALLED     no, but if none else listens activity -> UP (slow start); time -> TRIAL
    TRIAL       one request at a time        success -> UP (slow start); failure -> back, longer

DOWN means that nothing listens: no request is sent there, panic or not. SUSPECT means that the
replica answers badly or late. STALLED means that it takes requests and computes nothing (`Signs`).
A client's own errors and departures do not count. Once the replica
is out, the success of an earlier request does not count either.

A request that fails at two replicas in the same way is itself at fault: `absolve` takes back its
failures and their effect. They count until then, so that a broken replica is out after its third
failure, however long the second tries take.

`Signs` show that a replica is alive and at work, for requests whose answer is silent:

    alive     its answers go on, or its figures (/metrics) changed between two readings
    at work   its figures moved, and it has all requests that were sent to it; if it shows no
              figures: its other answers go on
    stalled   requests wait for a first byte, and it has not shown that it is alive for a while

The router waits for a replica that is at work. A tool call that a parser holds back is silent for
minutes, and an answer without a stream is silent until its end. The figures of an engine that hangs
stand still. An engine that has lost a request has fewer than were sent. Keep-alive comments are no
sign: an API server writes them whatever its engine does.

An engine shows a request with the end of its first step. If that step never ends, its figures say
that it is idle. If they show requests and stand still, it is waited for longer: a step may be long,
or its requests wait for KV. One that sleeps, or waits for prompts of others, is excused.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from msgspec import Struct

from router.base.backoff import Suspension
from router.records.record import Outcome


class ProbeFailure(Enum):
    """Why an active probe failed."""

    REFUSED = "refused"  # no connection: nothing listens
    TIMEOUT = "timeout"
    BAD_STATUS = "bad_status"


class HealthState(Enum):
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"
    STALLED = "stalled"
    TRIAL = "trial"


class HealthRules(Struct, frozen=True, kw_only=True):
    """How quickly to lose and regain trust."""

    failures_to_open: int = 3  # failed requests in a row
    probes_to_suspect: int = 3  # failed probes in a row, other than refused ones
    backoff_s: float = 1.0  # first pause of an open breaker; doubles each time it fails again
    max_backoff_s: float = 30.0
    slow_start_s: float = 10.0
    stalled_s: float = 60.0  # after its last evidence a request may try one that has stalled
    panic_ratio: float = 0.5  # below this share of usable candidates, suspects are offered too


class Health:
    """One replica's health. `jitter` arguments are uniform in [0, 1), drawn by the caller.

    More than a `Suspension`: probes and requests both open it, and a failure may be taken back.
    """

    __slots__ = (
        "_by_probe",
        "_failures",
        "_num_overdue",
        "_num_probe_failures",
        "_opened_as",
        "_opened_by",
        "_opened_on_trial",
        "_recovered_s",
        "_rules",
        "_stalled_until_s",
        "_state",
        "_suspension",
        "_trial",
        "reason",
    )

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._state = HealthState.UP
        self._failures: list[int] = []  # leases that failed in a row
        self._num_probe_failures = 0
        self._suspension = Suspension(rules.backoff_s, rules.max_backoff_s)
        self._num_overdue = 0  # in a row, without a first token between
        self._opened_as = HealthState.SUSPECT  # what the breaker last opened for
        self._opened_by: list[int] = []  # leases whose failures opened the breaker
        self._opened_on_trial = False
        self._stalled_until_s = 0.0
        self._by_probe = False  # probes opened the breaker, so a probe may close it
        self._recovered_s: float | None = None
        self._trial: int | None = None  # number of the lease under trial
        self.reason = ""  # of the last failure that changed the state; "" while there is none

    @property
    def is_unrestricted(self) -> bool:
        """Whether nothing restricts this replica, now or in time."""
        return self._state is HealthState.UP and self._recovered_s is None

    @property
    def retry_at_s(self) -> float:
        """When a breaker that requests opened lets one try."""
        return self._stalled_until_s if self.is_stalled else self._suspension.until_s

    @property
    def is_stalled(self) -> bool:
        """Whether it takes requests and computes nothing."""
        return self._state is HealthState.STALLED

    @property
    def is_down(self) -> bool:
        """Whether it is dead or hangs: nothing listens, or its probes fail."""
        return self._state is HealthState.DOWN or (
            self._state is HealthState.SUSPECT and self._by_probe
        )

    def state(self, now_s: float) -> HealthState:
        """Return the state; a breaker opened by requests turns to TRIAL when its pause is over."""
        if self._is_out() and not self._by_probe and now_s >= self.retry_at_s:
            self._state = HealthState.TRIAL
        return self._state

    def can_accept(self, now_s: float) -> bool:
        """Return whether a request may be sent: up, or on trial without a request."""
        state = self.state(now_s)
        return state is HealthState.UP or (state is HealthState.TRIAL and self._trial is None)

    def can_accept_in_panic(self, now_s: float) -> bool:
        """Return whether a request may be sent when most are out: to anything that listens."""
        return self.can_accept(now_s) or self._opened_as is HealthState.SUSPECT

    def can_accept_at_last(self) -> bool:
        """Return whether a request may be sent when there is nothing else: to one that stalled."""
        return self._opened_as is HealthState.STALLED

    def weight(self, now_s: float) -> float:
        """Return the share of normal load a recovered replica may have, in [0.1, 1]."""
        if self._recovered_s is None:
            return 1.0
        share = (now_s - self._recovered_s) / self._rules.slow_start_s
        if share >= 1.0:
            self._recovered_s = None
            return 1.0
        return max(0.1, share)

    def began(self, number: int, now_s: float) -> None:
        """Start the lease `number`; on trial it is the one that decides."""
        if self._state is not HealthState.UP and self._trial is None:
            if self.state(now_s) is HealthState.TRIAL:
                self._trial = number

    def answered(self, number: int, now_s: float) -> None:
        """Record a first token: it ends a trial well, before the last token."""
        self._num_overdue = 0
        if self._state is HealthState.TRIAL and self._trial == number:
            self._recover(now_s)

    def ended(self, number: int, outcome: Outcome, now_s: float, jitter: float) -> None:
        """Record a request's end."""
        on_trial = self._state is HealthState.TRIAL and self._trial == number
        if on_trial:
            self._trial = None
        match outcome:
            case Outcome.OK:
                if on_trial:
                    self._recover(now_s)
                elif self._state is HealthState.UP:
                    self._failures, self._num_overdue = [], 0
                    if self._suspension.until_s:  # it has been out
                        self._suspension.reset()
            case Outcome.REPLICA_UNREACHABLE:
                self._open(HealthState.DOWN, outcome.value, now_s, jitter, by_probe=False)
            case Outcome.REPLICA_FAILED:
                if on_trial or self._state is HealthState.UP:
                    self._failures.append(number)
                if on_trial or len(self._failures) >= self._rules.failures_to_open:
                    failures = self._failures
                    self._open(HealthState.SUSPECT, outcome.value, now_s, jitter, by_probe=False)
                    self._opened_by, self._opened_on_trial = failures, on_trial
            case Outcome.OVERDUE:
                # One may be an unusual prompt; several, and no first token: it hangs.
                self._num_overdue += self._state is HealthState.UP
                if on_trial or self._num_overdue >= self._rules.failures_to_open:
                    self._open(HealthState.SUSPECT, outcome.value, now_s, jitter, by_probe=False)
            case _:
                # CLIENT_ERROR: it answered. CLIENT_GONE: it had no time to. ROUTER_FAILED: it was
                # not asked. POOL_OVERDUE: the pool's. These count neither way; after a trial that
                # ends so, the next request is the trial.
                pass

    def absolve(self, number: int) -> None:
        """Remove the failure of lease `number`: the request was at fault, not the replica.

        A breaker that would not have opened without it closes again, as if it never had.
        """
        if number in self._failures:
            self._failures.remove(number)
        elif (
            number in self._opened_by and self._state is not HealthState.DOWN and not self._by_probe
        ):
            self._opened_by.remove(number)
            self._failures, self._opened_by = self._opened_by, []
            self._suspension.reset()
            self._state = HealthState.TRIAL if self._opened_on_trial else HealthState.UP
            self.reason = self.reason if self._opened_on_trial else ""

    def probe_ok(self, now_s: float) -> None:
        """Record that a probe succeeded."""
        self._num_probe_failures = 0
        if self._is_out() and self._by_probe:
            self._recover(now_s)
        elif self._state is HealthState.DOWN:
            self._state = HealthState.TRIAL  # it listens again: let a request try early

    def probe_excused(self) -> None:
        """Record that a probe got no answer, though bytes of answers came meanwhile."""
        self._num_probe_failures = 0

    def probe_failed(self, failure: ProbeFailure, now_s: float, jitter: float) -> None:
        """Record that a probe failed."""
        self._num_probe_failures += 1
        reason = f"probe {failure.value}"
        if failure is ProbeFailure.REFUSED:
            self._open(HealthState.DOWN, reason, now_s, jitter, by_probe=True)
        elif (
            self._num_probe_failures >= self._rules.probes_to_suspect
            and self._state is not HealthState.DOWN
        ):
            self._open(HealthState.SUSPECT, reason, now_s, jitter, by_probe=True)

    def stalled(self, quiet_s: float, now_s: float) -> None:
        """Record that the replica takes requests and has shown no activity for so long."""
        if self.is_down:
            return
        reason = f"it was sent requests, and has computed nothing for {quiet_s:.0f} s"
        self._open(HealthState.STALLED, reason, now_s, 0.0, by_probe=False)
        self._stalled_until_s = now_s + self._rules.stalled_s

    def moves(self, now_s: float) -> None:
        """Record that the replica shows activity; one that has stalled goes on."""
        if self.is_stalled:
            self._recover(now_s)

    def _is_out(self) -> bool:
        return self._state not in (HealthState.UP, HealthState.TRIAL)

    def _recover(self, now_s: float) -> None:
        self._state, self._trial = HealthState.UP, None
        self._failures, self._num_probe_failures = [], 0
        self._opened_by = []
        self._recovered_s = now_s
        self.reason = ""

    def _open(
        self, state: HealthState, reason: str, now_s: float, jitter: float, *, by_probe: bool
    ) -> None:
        """Send no requests until a pause is over (half of it jitter) or a probe succeeds."""
        if not self._is_out():
            self._suspension.begin(now_s, jitter=jitter)
            self._by_probe = False
        self._failures, self._opened_by, self._opened_on_trial = [], [], False
        self._num_overdue = 0
        self._state, self._opened_as, self.reason = state, state, reason
        self._by_probe = self._by_probe or by_probe
        self._trial = None
        self._recovered_s = None


STALLED_S: Final = 20.0
"""The least time without activity after which a replica that seems idle has stalled."""

_FROZEN_RATIO: Final = 3.0  # of that time, if its figures show requests
_LEARNED_RATIO: Final = 2.0  # of the longest time after which it went on by itself
_MOST_S: Final = 120.0
_LOOK_S: Final = 0.05
_MOST_LOOKING_S: Final = 3.0


class Figures(Struct, frozen=True, kw_only=True, gc=False):
    """What an engine shows of its work, all ranks together."""

    num_requests: int  # running and waiting
    progress: tuple[float, ...]  # numbers that move while it works


def _ignore() -> None:
    """Read no figures."""


class Signs:
    """Signs of one replica. Times are monotonic seconds.

    asked_s: Since when requests wait there for a first byte, without a moment in which none did.
        None: none waits.
    overdue_s: Since when one waited that left because it was overdue, with no activity since.
    said_s: When more than a keep-alive comment of an answer came last.
    moved_s: When a reading last had other figures than the one before.
    has_broken: A request failed there as it does when a replica dies.
    on_doubt: Called when it should be probed, or its figures read, at once.
    """

    __slots__ = (
        "_excused_s",
        "_figures",
        "_longest_s",
        "_progress",
        "_quiet_s",
        "_read_s",
        "_seen_s",
        "_worked_s",
        "asked_s",
        "has_broken",
        "moved_s",
        "on_doubt",
        "overdue_s",
        "said_s",
    )

    def __init__(self) -> None:
        self.asked_s: float | None = None
        self.overdue_s: float | None = None
        self.said_s = self.moved_s = 0.0
        self.has_broken = False
        self.on_doubt: Callable[[], None] = _ignore
        self._figures: Figures | None = None  # as of the last reading; None: it showed none
        self._progress: tuple[float, ...] | None = None  # as of the last reading that showed any
        self._read_s = self._worked_s = self._seen_s = self._excused_s = 0.0
        self._quiet_s: float | None = None  # since when it shows no activity though requests wait
        self._longest_s = 0.0  # that it showed none, and then went on

    @property
    def alive_s(self) -> float:
        """When it last showed that it is alive."""
        return max(self.said_s, self.moved_s)

    def broke(self) -> None:
        """Record that a request failed as at a dying replica, and ask whether it is still there."""
        self.has_broken = True
        self.on_doubt()

    def read(
        self, figures: Figures | None, num_sent: int, now_s: float, *, is_excused: bool = False
    ) -> bool | None:
        """Record a reading; return whether it has stalled. None: nothing shows either.

        Args:
            figures: None: there are none.
            num_sent: Requests that were sent there and have not ended.
            now_s: Now.
            is_excused: It computes nothing for a reason that is known.
        """
        last, self._figures, last_read_s, self._read_s = self._figures, figures, self._read_s, now_s
        if figures is None:
            return None
        if last is not None and last != figures:
            self.moved_s = now_s
        before, self._progress = self._progress, figures.progress
        if figures.num_requests >= max(1, num_sent):
            if before is None:
                self._worked_s = now_s  # it may have moved since it was asked
            elif before != figures.progress:
                self._worked_s = self._seen_s = now_s
        if self.alive_s > last_read_s:
            self._longest_s = max(self._longest_s, self.quiet_s(now_s))
            self._quiet_s = self.overdue_s = None
            return False
        if is_excused:
            self._excused_s = now_s
        since = [each for each in (self.asked_s, self.overdue_s) if each is not None]
        if last is None or not since:
            self._quiet_s = None
            return None
        self._quiet_s = max(min(since), self.alive_s, self._excused_s)
        limit_s = max(STALLED_S, min(_LEARNED_RATIO * self._longest_s, _MOST_S))
        if figures.num_requests:
            limit_s *= _FROZEN_RATIO
        return True if now_s - self._quiet_s >= limit_s else None

    def quiet_s(self, now_s: float) -> float:
        """Return for how long it has shown no activity although requests wait."""
        return now_s - self._quiet_s if self._quiet_s is not None else 0.0

    def works_since(self, since_s: float) -> bool | None:
        """Return whether it was seen at work since then. None: it shows no figures."""
        if self._figures is None:
            return None
        return self._seen_s > since_s

    def wait_s(self, since_s: float, limit_s: float, now_s: float) -> float | None:
        """Return how long to wait for an answer that is silent since then; None: no longer.

        The wait ends once the replica has not been seen at work for `limit_s` either. Before that
        its figures are read once more: readings may be further apart than the limit.
        """
        last_s = max(since_s, self._worked_s)
        if self._figures is None:
            last_s = max(last_s, self.said_s)
        due_s = last_s + limit_s
        if now_s < due_s:
            return due_s - now_s
        if self._read_s >= due_s or now_s >= due_s + min(limit_s, _MOST_LOOKING_S):
            return None
        self.on_doubt()
        return _LOOK_S
