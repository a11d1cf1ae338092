"""History as a conversation: what is applied, what is asked for, and what shows another engine."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.index.candidate_stream import HistoryCounters
from router.kv_events.sequence import MAX_FAILED_REPLAYS, BatchAction, History
from tests.effort import examples

APPLY, IGNORE, BEGIN = BatchAction.APPLY, BatchAction.IGNORE, BatchAction.BEGIN
PARTIAL, EMPTY, RESTARTED = BatchAction.BEGIN_PARTIAL, BatchAction.EMPTY, BatchAction.RESTARTED


def mark(sequence: int, engine: str = "first") -> bytes:
    return f"{engine}{sequence}".encode()


def history(*, has_replay: bool = True) -> History:
    subject = History(HistoryCounters())
    subject.opened(has_replay=has_replay)
    return subject


def live(subject: History, *sequences: int, engine: str = "first") -> list[BatchAction]:
    return [subject.live(sequence, mark(sequence, engine)) for sequence in sequences]


def replay(subject: History, *sequences: int, is_complete: bool = True) -> list[BatchAction]:
    """Play the wanted replay with these replies; the last action is the end's."""
    subject.begin_replay()
    verdicts = [subject.reply(sequence, mark(sequence)) for sequence in sequences]
    return [*verdicts, subject.end_replay(is_complete=is_complete)]


def joined(*sequences: int) -> History:
    """A history that began with these batches replayed."""
    subject = history()
    subject.ask()
    replay(subject, *sequences)
    return subject


def test_the_next_in_order_passes_while_a_check_is_wanted() -> None:
    """A quiet check does not hold up the stream."""
    subject = joined(0, 1)
    subject.ask()

    assert live(subject, 2) == [APPLY]
    assert replay(subject, 1, 2) == [IGNORE, IGNORE, IGNORE]
    assert subject.wanted is None


def test_a_late_duplicate_is_not_a_restart() -> None:
    """The same batch again is ignored."""
    subject = joined(0, 1, 2)

    assert live(subject, 1, 0, 2) == [IGNORE, IGNORE, IGNORE]
    assert subject.wanted is None


def test_a_sequence_too_old_to_remember_is_checked() -> None:
    """Whether it is late or another engine's only a replay can show."""
    subject = joined(*range(3000))

    assert live(subject, 5) == [IGNORE]
    assert subject.wanted == 2999


def test_without_replay_a_restart_is_seen_live() -> None:
    """Begin anew with what is there."""
    subject = history(has_replay=False)
    live(subject, 3, 4)

    assert live(subject, 3, engine="second") == [PARTIAL]
    assert live(subject, 0, engine="third") == [BEGIN]
    assert not subject.ask_all()


def test_a_hole_that_never_closes_is_given_up() -> None:
    """No progress is a failure, and failures come to an end."""
    subject = joined(0, 1)
    subject.ask()
    for _ in range(MAX_FAILED_REPLAYS):
        assert subject.wanted == 1
        replay(subject, 1, 3)

    assert subject.wanted is None
    assert live(subject, 3) == [PARTIAL]


def test_a_broken_replay_goes_on_where_it_broke() -> None:
    """What came before was progress."""
    subject = history()
    subject.ask()

    assert replay(subject, 0, 1, is_complete=False) == [BEGIN, APPLY, IGNORE]
    assert subject.wanted == 1
    assert not replay(subject, is_complete=False)[:-1]
    assert subject.wanted == 1


def test_a_dead_replay_endpoint_is_given_up_until_the_next_connection() -> None:
    """History is then what comes from now on."""
    subject = history()
    subject.ask()
    for _ in range(MAX_FAILED_REPLAYS):
        replay(subject, is_complete=False)

    assert subject.wanted is None
    assert subject.is_caught_up
    assert live(subject, 7) == [PARTIAL]
    assert not subject.ask()
    subject.trust_replay()
    assert subject.ask()


def test_asking_for_all_during_a_replay_makes_its_rest_useless() -> None:
    """What still comes was asked for by an earlier run."""
    subject = joined(0, 1)
    subject.ask()
    subject.begin_replay()
    subject.reply(1, mark(1))
    subject.ask_all()

    assert subject.reply(2, mark(2)) is IGNORE
    assert subject.end_replay(is_complete=True) is IGNORE
    assert subject.wanted == 0
    assert not subject.is_caught_up


def test_asking_for_all_survives_a_broken_replay() -> None:
    """The order stands although the replay it interrupted failed."""
    subject = joined(0, 1)
    subject.ask()
    subject.begin_replay()
    subject.ask_all()
    subject.end_replay(is_complete=False)

    assert subject.wanted == 0
    assert replay(subject, 0, 1)[0] is BEGIN


def test_a_suspicion_during_a_replay_asks_again() -> None:
    """The replies under way may be the old engine's."""
    fresh, known = history(), joined(0, 1)
    for subject in (fresh, known):
        subject.ask()
        subject.begin_replay()
        subject.mark_suspect()
        assert subject.reply(2, mark(2)) is IGNORE
        subject.end_replay(is_complete=True)

    assert (fresh.wanted, known.wanted) == (0, 1)


class _Engine:
    """Batches that carry their number; the buffer holds the last few."""

    def __init__(self, name: int) -> None:
        self.name = str(name)
        self.batches: list[tuple[int, bytes]] = []

    def publish(self) -> tuple[int, bytes]:
        sequence = len(self.batches)
        self.batches.append((sequence, mark(sequence, self.name)))
        return self.batches[-1]


@settings(max_examples=examples(300))
@given(
    seed=st.integers(0, 2**32), num_steps=st.integers(1, 60), buffer_steps=st.sampled_from([3, 99])
)
def test_whatever_goes_wrong_the_truth_is_reached(
    seed: int, num_steps: int, buffer_steps: int
) -> None:
    """Losses, restarts, dropped replies, late joins: what is applied in an epoch is in order,
    of one engine, without a hole, and a quiet check in the end brings it up to date."""
    rng = random.Random(seed)
    engine, subject = _Engine(0), history()
    epoch: list[bytes] = []

    def act(action: BatchAction, batch: bytes) -> None:
        if action in (BEGIN, PARTIAL, EMPTY, RESTARTED):
            epoch.clear()
        if action in (BEGIN, PARTIAL, APPLY):
            epoch.append(batch)

    def serve_replay(drop: float) -> None:
        start = subject.begin_replay()
        is_cut = rng.random() < drop
        for sequence, batch in engine.batches[-buffer_steps:]:
            if sequence >= start and not (epoch and rng.random() < drop):
                act(subject.reply(sequence, batch), batch)
        act(subject.end_replay(is_complete=not is_cut), b"")

    for number in range(num_steps):
        event = rng.random()
        if event < 0.6:
            sequence, batch = engine.publish()
            if rng.random() < 0.7:
                act(subject.live(sequence, batch), batch)
        elif event < 0.7:
            engine = _Engine(number + 1)
            subject.mark_suspect()
        elif event < 0.8 and subject.wanted is None:
            subject.trust_replay()
            subject.ask()
        if subject.wanted is not None and rng.random() < 0.5:
            serve_replay(drop=0.2)
    for _ in range(4):
        subject.trust_replay()
        if subject.wanted is None:
            subject.ask()
        while subject.wanted is not None:
            serve_replay(drop=0.0)

    truth = [batch for _, batch in engine.batches]
    assert epoch == truth[len(truth) - len(epoch) :]
    assert len(epoch) >= min(len(truth), 1)
