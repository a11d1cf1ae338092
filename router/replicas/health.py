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
replica answers badly or late. STALLED means that it takes requests and computes nothing
(`router.replicas.signs`). A client's own errors and departures do not count. Once the replica
is out, the success of an earlier request does not count either.

A request that fails at two replicas in the same way is itself at fault: `absolve` takes back its
failures and their effect. They count until then, so that a broken replica is out after its third
failure, however long the second tries take.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from router.base.backoff import Suspension
from router.records.outcome import Outcome


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
