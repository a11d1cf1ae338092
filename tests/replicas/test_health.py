from __future__ import annotations

import pytest

from router.records.record import Outcome
from router.replicas.health import Health, HealthRules, HealthState, ProbeFailure

RULES = HealthRules(failures_to_open=3, backoff_s=1.0, max_backoff_s=5.0, slow_start_s=10.0)


def opened(*, outcome: Outcome = Outcome.REPLICA_FAILED) -> Health:
    """Open a breaker at time 0, without jitter's half: the pause is 0.5 s."""
    health = Health(RULES)
    for number in range(3):
        health.ended(number, outcome, 0.0, 0.0)
    return health


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE])
def test_the_client_never_counts(outcome: Outcome) -> None:
    health = Health(RULES)
    for number in range(1000):
        health.ended(number, outcome, 0.0, 0.0)
    assert health.is_unrestricted

    health.ended(1, Outcome.REPLICA_FAILED, 0.0, 0.0)
    health.ended(2, outcome, 0.0, 0.0)
    health.ended(3, Outcome.REPLICA_FAILED, 0.0, 0.0)
    health.ended(4, Outcome.REPLICA_FAILED, 0.0, 0.0)
    assert health.state(0.0) is HealthState.SUSPECT


def test_failures_in_a_row_open_the_breaker() -> None:
    health = Health(RULES)
    for number in range(10):
        health.ended(number, Outcome.REPLICA_FAILED, 0.0, 0.0)
        health.ended(number, Outcome.REPLICA_FAILED, 0.0, 0.0)
        health.ended(number, Outcome.OK, 0.0, 0.0)

    assert health.state(0.0) is HealthState.UP
    assert opened().state(0.0) is HealthState.SUSPECT
    assert opened().reason == "replica_failed"


def test_a_refused_connection_opens_at_once() -> None:
    health = Health(RULES)
    health.ended(1, Outcome.REPLICA_UNREACHABLE, 0.0, 0.0)

    assert health.state(0.0) is HealthState.DOWN
    assert not health.can_accept_in_panic(0.0)
    assert opened().can_accept_in_panic(0.0)


def test_one_request_at_a_time_tries_a_suspect() -> None:
    health = opened()
    assert not health.can_accept(0.49)
    assert health.can_accept(0.5)

    health.began(7, 0.5)
    assert not health.can_accept(0.6)
    health.answered(8, 0.7)
    assert health.state(0.7) is HealthState.TRIAL
    health.answered(7, 0.7)
    assert health.state(0.7) is HealthState.UP
    assert health.reason == ""


def test_a_trial_may_also_end_well_without_a_first_token() -> None:
    health = opened()
    health.began(7, 1.0)
    health.ended(7, Outcome.OK, 2.0, 0.0)

    assert health.state(2.0) is HealthState.UP


def test_failed_trials_wait_longer_and_longer_up_to_the_cap() -> None:
    health, now_s, pauses = opened(), 0.0, []
    for number in range(10, 14):
        now_s = health.retry_at_s
        health.began(number, now_s)
        health.ended(number, Outcome.REPLICA_FAILED, now_s, 1.0)
        pauses.append(health.retry_at_s - now_s)

    assert pauses == pytest.approx([2.0, 4.0, 5.0, 5.0])
    for number in range(2000):  # the exponent has a cap of its own
        now_s = health.retry_at_s
        health.began(number, now_s)
        health.ended(number, Outcome.REPLICA_FAILED, now_s, 1.0)
    assert health.retry_at_s - now_s == pytest.approx(5.0)


def test_a_success_forgets_past_pauses() -> None:
    health = opened()
    health.began(7, 1.0)
    health.ended(7, Outcome.OK, 1.0, 0.0)
    health.ended(8, Outcome.OK, 2.0, 0.0)
    for number in range(3):
        health.ended(number, Outcome.REPLICA_FAILED, 3.0, 1.0)

    assert health.retry_at_s == pytest.approx(4.0)


def test_a_trial_whose_client_left_makes_room_for_the_next() -> None:
    health = opened()
    health.began(7, 1.0)
    health.ended(7, Outcome.CLIENT_GONE, 1.0, 0.0)
    health.probe_ok(1.0)

    assert health.state(1.0) is HealthState.TRIAL
    assert health.can_accept(1.0)


def test_requests_sent_before_say_nothing_once_it_is_out() -> None:
    health = opened()
    retry_at_s = health.retry_at_s
    health.ended(50, Outcome.OK, 0.1, 0.0)
    for number in range(51, 60):
        health.ended(number, Outcome.REPLICA_FAILED, 0.2, 1.0)

    assert health.state(0.3) is HealthState.SUSPECT
    assert health.retry_at_s == retry_at_s
    assert health.state(0.5) is HealthState.TRIAL
    health.ended(60, Outcome.OK, 0.6, 0.0)
    assert health.state(0.6) is HealthState.TRIAL


def test_refused_probes_take_a_replica_out_until_one_succeeds() -> None:
    health = Health(RULES)
    health.probe_failed(ProbeFailure.REFUSED, 0.0, 0.0)

    assert health.state(1e9) is HealthState.DOWN
    assert health.reason == "probe refused"
    health.probe_ok(1e9)
    assert health.state(1e9) is HealthState.UP


@pytest.mark.parametrize("failure", [ProbeFailure.TIMEOUT, ProbeFailure.BAD_STATUS])
def test_other_failed_probes_need_three_in_a_row(failure: ProbeFailure) -> None:
    health = Health(RULES)
    for _ in range(2):
        health.probe_failed(failure, 0.0, 0.0)
    health.probe_ok(0.0)
    for _ in range(2):
        health.probe_failed(failure, 0.0, 0.0)
    assert health.is_unrestricted

    health.probe_failed(failure, 0.0, 0.0)
    assert health.state(0.0) is HealthState.SUSPECT
    assert health.can_accept_in_panic(0.0)


def test_a_probe_does_not_close_what_requests_opened() -> None:
    health = opened()
    health.probe_ok(0.1)

    assert health.state(0.1) is HealthState.SUSPECT


def test_a_probe_lets_a_restarted_replica_be_tried_at_once() -> None:
    health = opened(outcome=Outcome.REPLICA_UNREACHABLE)
    health.probe_ok(0.1)

    assert health.state(0.1) is HealthState.TRIAL


def test_down_outranks_suspect() -> None:
    health = Health(RULES)
    health.probe_failed(ProbeFailure.REFUSED, 0.0, 0.0)
    for number in range(5):
        health.probe_failed(ProbeFailure.TIMEOUT, 0.0, 0.0)
        health.ended(number, Outcome.REPLICA_FAILED, 0.0, 0.0)
    assert health.state(0.0) is HealthState.DOWN

    suspect = opened()
    suspect.probe_failed(ProbeFailure.REFUSED, 0.1, 0.0)
    assert suspect.state(9.0) is HealthState.DOWN


def test_failing_in_a_panic_changes_nothing() -> None:
    health = opened()
    health.began(9, 0.1)
    health.ended(9, Outcome.REPLICA_UNREACHABLE, 0.2, 1.0)

    assert health.state(0.2) is HealthState.DOWN
    assert health.retry_at_s == 0.5


def test_slow_start_ramps_to_full_weight() -> None:
    health = Health(RULES)
    assert health.weight(0.0) == 1.0
    health.probe_failed(ProbeFailure.REFUSED, 0.0, 0.0)
    health.probe_ok(100.0)

    assert not health.is_unrestricted
    assert [health.weight(at_s) for at_s in (100.0, 105.0, 110.0)] == [0.1, 0.5, 1.0]
    assert health.is_unrestricted


def test_an_absolved_failure_has_no_effect() -> None:
    health = Health(RULES)
    for number in range(7):
        health.ended(number, Outcome.REPLICA_FAILED, 0.0, 0.0)
    for number in range(7):
        health.absolve(number)

    assert health.state(0.1) is HealthState.UP
    assert health.is_unrestricted
    for number in (7, 8):
        health.ended(number, Outcome.REPLICA_FAILED, 0.2, 0.0)
        health.absolve(number)
    health.ended(9, Outcome.REPLICA_FAILED, 0.2, 0.0)
    health.ended(10, Outcome.REPLICA_FAILED, 0.2, 0.0)
    assert health.state(0.2) is HealthState.UP
    health.ended(11, Outcome.REPLICA_FAILED, 0.2, 0.0)
    assert health.state(0.2) is HealthState.SUSPECT
    assert health.retry_at_s == pytest.approx(0.7)  # its first time


def test_an_absolved_trial_is_made_again() -> None:
    health = opened()
    health.began(7, 1.0)
    health.ended(7, Outcome.REPLICA_FAILED, 1.1, 0.0)
    assert not health.can_accept(1.2)

    health.absolve(7)
    assert health.state(1.2) is HealthState.TRIAL
    assert health.can_accept(1.2)


def test_failures_that_probes_confirm_are_not_absolved() -> None:
    health = opened()
    for _ in range(3):
        health.probe_failed(ProbeFailure.TIMEOUT, 0.0, 0.0)
    health.absolve(0)
    assert health.state(0.1) is HealthState.SUSPECT

    health.ended(9, Outcome.REPLICA_UNREACHABLE, 0.1, 0.0)
    health.absolve(1)
    assert health.state(0.2) is HealthState.DOWN


def stalled(now_s: float = 0.0) -> Health:
    health = Health(RULES)
    health.stalled(20.0, now_s)
    return health


def test_a_replica_that_stalled_is_offered_when_nothing_else_is_left() -> None:
    health = stalled()

    assert health.state(59.0) is HealthState.STALLED
    assert "computed nothing for 20 s" in health.reason
    assert not health.can_accept(59.0)
    assert not health.can_accept_in_panic(59.0)
    assert health.can_accept_at_last()
    assert not health.is_down


def test_a_replica_that_stalled_goes_on_by_a_sign_of_life_or_a_trial() -> None:
    health = stalled()
    health.moves(5.0)
    assert health.state(5.0) is HealthState.UP
    assert health.weight(5.0) == 0.1

    health = stalled()
    health.stalled(25.0, 5.0)  # evidence again
    assert health.state(64.0) is HealthState.STALLED
    assert health.retry_at_s == 65.0
    assert health.can_accept(65.0)
    health.began(1, 65.0)
    assert not health.can_accept(66.0)
    health.stalled(20.0, 90.0)
    assert health.state(91.0) is HealthState.STALLED
    health.state(150.0)
    health.began(2, 150.0)
    health.answered(2, 151.0)
    assert health.state(151.0) is HealthState.UP


def test_what_waited_at_a_replica_that_stalled_is_not_held_against_it() -> None:
    """Its requests fail when they leave; a probe proves nothing."""
    health = stalled()
    for number in range(5):
        health.ended(number, Outcome.REPLICA_FAILED, 1.0, 0.0)
    health.probe_ok(2.0)
    assert health.state(2.0) is HealthState.STALLED


def test_a_dead_replica_has_not_stalled() -> None:
    health = stalled()
    health.probe_failed(ProbeFailure.REFUSED, 1.0, 0.0)
    health.stalled(30.0, 2.0)
    assert health.state(2.0) is HealthState.DOWN
    health.probe_ok(3.0)
    assert health.state(3.0) is HealthState.UP
    health.stalled(30.0, 4.0)
    assert health.state(4.0) is HealthState.STALLED
