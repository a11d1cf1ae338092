"""Conversations with one rank's stream: what it believes, and what the index then says."""

from __future__ import annotations

from typing import Any

import pytest

from router.base.contracts import ExtraKeys, HashContract
from router.kv_events.contract_search import MAX_MISSES, VERIFY_EVERY
from router.kv_events.stream import BLIND_AFTER_S
from router.kv_events.wire import AllBlocksCleared, BlockStored, WireShape
from tests.engine import BLOCK_SIZE, CONTRACT, batch, hashes, prompt, removed, stored
from tests.fuzz.samples import BAD_TOKENS, POISONS
from tests.kv_events.talk import R1, Talk

RANDOM = HashContract(algorithm="xxhash", block_size=BLOCK_SIZE, seed="drawn at random")
OTHER = HashContract(algorithm="sha256_cbor", block_size=BLOCK_SIZE)


def test_a_stream_without_a_batch_is_blind() -> None:
    """No events, no belief; the guess is the default contract of the given block size."""
    talk = Talk()

    assert talk.stream.state_and_reason() == ("blind", "no events yet")
    assert talk.stream.contract == CONTRACT
    assert not talk.stream.has_history
    talk.join()
    assert talk.stream.state == "blind"
    assert talk.stream.has_history


@pytest.mark.parametrize("shape", ["map", "array"])
def test_the_first_prompt_makes_it_exact(shape: WireShape) -> None:
    """One event that starts a prompt verifies the contract."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1)), shape=shape))

    assert talk.stream.state_and_reason() == ("exact", "")
    assert talk.num_matched(prompt(1)) == 3
    assert talk.stream.counters.blocks.num_stored == 3


def test_another_contract_is_found() -> None:
    """The engine's algorithm is not the guess."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1), contract=OTHER)))

    assert talk.stream.contract == OTHER
    assert talk.stream.state == "exact"
    assert talk.num_matched(prompt(1)) == 3


def test_evictions_and_clears_are_followed() -> None:
    """Removed blocks go, and all of them when the cache is reset."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1)), removed(hashes(prompt(1))[1:])))

    assert talk.num_matched(prompt(1)) == 1
    talk.say(batch(AllBlocksCleared(), stored(prompt(2))))
    assert talk.matched([1, 2]) == [0, 3]
    talk.say(batch(removed(hashes(prompt(9)))))
    assert talk.stream.counters.blocks.num_missing == 3


def test_history_before_joining_counts() -> None:
    """Truncated history is used as far as it goes, and a clear makes it whole again."""
    talk = Talk()
    talk.history = [batch(stored(prompt(number))) for number in range(5)]
    talk.stream.connected()
    talk.replay(oldest=3)

    assert talk.matched(range(5)) == [0, 0, 0, 3, 3]
    assert talk.stream.state_and_reason() == (
        "degraded",
        "history before the router joined is lost",
    )
    talk.say(batch(AllBlocksCleared()))
    assert talk.stream.state == "exact"


def test_a_whole_cache_of_known_evictions_ends_lost_history() -> None:
    """The least recently used blocks go first, so none of an unknown time is left."""
    talk = Talk(capacity_blocks=6)
    talk.history = [batch(stored(prompt(number))) for number in range(3)]
    talk.stream.connected()
    talk.replay(oldest=1)
    talk.say(batch(removed(hashes(prompt(1)))), batch(removed(hashes(prompt(0)))))
    talk.say(batch(removed(hashes(prompt(2)))))
    early = talk.stream.state

    talk.say(batch(stored(prompt(3))), batch(removed(hashes(prompt(3)))))

    assert early == "degraded"
    assert talk.stream.state == "exact"


def test_a_cpu_tier_keeps_lost_history_unknown() -> None:
    """What a cpu tier had before is not evicted with the GPU's blocks."""
    talk = Talk(capacity_blocks=3)
    talk.history = [batch(stored(prompt(number))) for number in range(2)]
    talk.stream.connected()
    talk.replay(oldest=1)
    talk.say(batch(stored(prompt(1), medium="CPU")), batch(removed(hashes(prompt(1)))))

    assert talk.stream.state_and_reason()[1] == "history before the router joined is lost"


def test_it_is_not_exact_before_its_history_is_read() -> None:
    """Until the last reply has come, blocks may be missing or long gone."""
    talk = Talk()
    talk.history = [batch(stored(prompt(number))) for number in range(3)]
    talk.stream.connected()
    talk.stream.begin_replay()
    for sequence, payload in enumerate(talk.history[:2]):
        talk.stream.replayed(sequence, payload)

    assert talk.stream.state_and_reason() == ("degraded", "event history is being read")
    assert not talk.stream.has_history
    talk.stream.replayed(2, talk.history[2])
    talk.stream.end_replay(is_complete=True)
    assert talk.stream.state == "exact"
    assert talk.stream.has_history


def test_it_is_not_exact_while_batches_are_missing() -> None:
    """A gap says so until it is filled; a look whether one was missed says nothing."""
    talk = Talk().join()
    talk.say(*[batch(stored(prompt(number))) for number in range(2)])
    talk.stream.verify()
    assert talk.stream.state == "exact"
    talk.replay()
    talk.history.append(batch(stored(prompt(2))))  # lost on its way
    talk.say(batch(stored(prompt(3))))

    assert talk.stream.state_and_reason() == ("degraded", "event history is being read")
    talk.replay()
    assert talk.stream.state == "exact"
    assert talk.matched(range(4)) == [3, 3, 3, 3]


def test_a_restarted_engine_begins_an_epoch() -> None:
    """Nothing of the old process holds, not even its contract."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))), batch(stored(prompt(2))))
    epoch = talk.stream.epoch
    talk.history = [batch(stored(prompt(3), contract=OTHER))]
    talk.join()

    assert talk.stream.epoch > epoch
    assert talk.stream.contract == OTHER
    assert talk.matched([1, 2, 3]) == [0, 0, 3]
    assert talk.stream.counters.history.num_restarts == 1


def test_a_restarted_engine_that_is_idle_has_nothing() -> None:
    """Its contract waits to be verified; the last one found is the guess."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1), contract=OTHER)))
    talk.history = []
    talk.join()

    assert talk.num_matched(prompt(1)) == 0
    assert talk.stream.state_and_reason() == ("degraded", "hash contract is not verified yet")
    assert talk.stream.contract == OTHER


# -- what is not indexed ---------------------------------------------------------------------


def test_unknown_tiers_are_counted_and_never_credited() -> None:
    """A block on a disk somewhere is not a block in the GPU."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1), medium="STORAGE"), removed([1], medium="STORAGE")))

    assert talk.num_matched(prompt(1)) == 0
    assert talk.stream.counters.blocks.num_unknown_medium == 4


@pytest.mark.parametrize("medium", ["cpu", "CPU"])
def test_the_cpu_tier_is_kept_apart(medium: str) -> None:
    """Offloaded blocks prolong the match, under both spellings."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))), batch(removed(hashes(prompt(1))[1:])))
    talk.say(batch(stored(prompt(1), medium=medium)))
    chain, _ = talk.stream.contract.extend(None, prompt(1))
    match = talk.index.match(chain, [R1])[R1]

    assert (match.num_gpu_blocks, match.num_cpu_blocks) == (1, 3)


def test_groups_without_a_kind_are_indexed() -> None:
    """Older engines name no kinds; connectors name a group only, and teach nothing."""
    talk = Talk().join()
    talk.say(
        batch(
            stored(prompt(1), group=None, kind=None),
            stored(prompt(2), group=0, kind=None),
            stored(prompt(4), group=5, kind=None, medium="cpu"),
            removed(hashes(prompt(1)), group=None),
        )
    )

    assert talk.matched([1, 2, 4]) == [0, 3, 0]
    assert talk.index.num_blocks(R1, "cpu") == 0
    assert talk.stream.counters.blocks.num_other_groups == 3


def test_blocks_of_another_size_are_left_out() -> None:
    """Partial entries and other groups' sizes are not links of our chain; 0: not given."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))))
    half = HashContract(algorithm="sha256", block_size=2)
    talk.say(batch(stored(prompt(2), contract=half)))
    placeholder = BlockStored(block_hashes=list(hashes(prompt(3))), block_size=0, medium="CPU")
    talk.say(batch(placeholder))

    assert talk.stream.counters.blocks.num_other_sizes == 6
    assert talk.index.num_blocks(R1, "cpu") == 3


def test_hashes_as_bytes_name_the_same_blocks() -> None:
    """An engine may publish raw digests instead of integers."""
    talk = Talk().join()
    event = stored(prompt(1))
    event.block_hashes = list(CONTRACT.digests(None, prompt(1)))
    talk.say(batch(event))

    assert talk.num_matched(prompt(1)) == 3
    assert talk.stream.state == "exact"


# -- extra keys and verification -------------------------------------------------------------


def test_salted_prompts_are_found_under_their_salt() -> None:
    """The salt is part of the prompt's identity."""
    salted = ExtraKeys(cache_salt="t1")
    talk = Talk().join()
    talk.say(batch(stored(prompt(1), extra=salted)))

    assert talk.stream.state == "exact"
    assert talk.num_matched(prompt(1), salted) == 3
    assert talk.num_matched(prompt(1)) == 0


def test_a_prompt_that_starts_with_an_image_proves_nothing() -> None:
    """It is not counted as a miss: a plain prompt has to come."""
    talk = Talk().join()
    for number in range(MAX_MISSES + 1):
        event = stored(prompt(number))
        event.extra_keys = [[["image", 0]], None, None]
        talk.say(batch(event))

    assert talk.stream.state_and_reason() == ("degraded", "hash contract is not verified yet")
    assert talk.stream.reason == "hash contract is not verified yet"
    assert talk.stream.counters.blocks.num_contract_misses == 0
    talk.say(batch(stored(prompt(50))))
    assert talk.stream.state == "exact"


def test_bare_extra_keys_are_noticed_when_the_first_come() -> None:
    """A plain prompt leaves open whether extra keys are tagged; the first salted one shows it."""
    salted = ExtraKeys(cache_salt="t1")
    bare = HashContract(algorithm="sha256", block_size=BLOCK_SIZE, tagged=False)
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))))
    assert talk.stream.contract.tagged
    talk.say(batch(stored(prompt(2), contract=bare, extra=salted)))

    assert talk.stream.contract == bare
    assert talk.num_matched(prompt(2), salted) == 3
    talk.say(batch(stored(prompt(3), contract=bare, extra=salted)))
    assert talk.stream.state == "exact"


def test_an_adapter_with_unknown_path_does_not_shake_the_contract() -> None:
    """It cannot be verified; after some tries it is not checked any more."""
    adapted = ExtraKeys(lora=("sql", "/unknown"))
    talk = Talk().join()
    talk.say(batch(stored(prompt(0))))
    for number in range(1, 80):
        talk.say(batch(stored(prompt(number, 1), extra=adapted)))

    assert talk.stream.state == "exact"
    assert talk.stream.contract == CONTRACT


def test_an_engine_swapped_unseen_is_noticed_in_time() -> None:
    """One in so many events is verified; then the search begins again."""
    talk = Talk().join()
    for number in range(VERIFY_EVERY + 1):
        talk.say(batch(stored(prompt(number, 1))))
    assert talk.stream.state == "exact"
    talk.history = []
    for number in range(2 * VERIFY_EVERY):
        talk.history.append(batch(stored(prompt(number, 1), contract=OTHER)))
        talk.stream.receive(VERIFY_EVERY + 1 + number, talk.history[-1])
        if talk.stream.wanted_replay is not None:
            break
    talk.replay()

    assert talk.stream.contract == OTHER
    assert talk.stream.state == "exact"
    assert talk.num_matched(prompt(5, 1)) == 1


# -- translation -----------------------------------------------------------------------------


def translating(**options: Any) -> Talk:
    """A talk with an engine whose seed is unknown."""
    talk = Talk(**options).join()
    for number in range(MAX_MISSES):
        talk.say(batch(stored(prompt(number), contract=RANDOM)))
    talk.replay()
    return talk


def test_unknown_hashes_are_translated_history_included() -> None:
    """After some misses the history is read again, with tokens, under our own hashes."""
    talk = translating()

    assert talk.stream.contract.algorithm == "warmroute"
    assert talk.stream.state_and_reason() == (
        "degraded",
        "hashes cannot be computed and are translated",
    )
    assert talk.matched(range(MAX_MISSES)) == [3] * MAX_MISSES
    assert talk.stream.counters.blocks.num_contract_misses == MAX_MISSES


def test_translated_blocks_grow_are_evicted_and_cleared() -> None:
    """Parents, duplicates and removals are named by the engine's hashes."""
    talk = translating()
    names = hashes(prompt(1, 5), RANDOM)
    talk.say(batch(stored(prompt(1, 5), contract=RANDOM, skip=3)))
    assert talk.num_matched(prompt(1, 5)) == 5
    talk.say(batch(stored(prompt(1, 5), contract=RANDOM), removed(names[3:])))
    assert talk.num_matched(prompt(1, 5)) == 5
    talk.say(batch(removed(names[3:]), removed([12345])))
    assert talk.num_matched(prompt(1, 5)) == 3
    assert talk.stream.counters.blocks.num_missing == 1
    talk.say(batch(AllBlocksCleared(), stored(prompt(1, 5), contract=RANDOM, skip=3)))
    assert talk.num_matched(prompt(1, 5)) == 0
    assert talk.stream.counters.blocks.num_untranslated == 2


def test_translation_without_replay_goes_on_from_here() -> None:
    """What was stored before cannot be named any more."""
    talk = translating(has_replay=False)
    talk.say(batch(stored(prompt(50), contract=RANDOM)))

    assert talk.num_matched(prompt(50)) == 3
    assert talk.matched([0]) == [0]
    assert talk.stream.state == "degraded"


def test_translation_knows_salts_and_adapters_but_not_images() -> None:
    """Extra keys are hashed as for requests; a block with an image ends what can be named."""
    talk = translating()
    salted, adapted = ExtraKeys(cache_salt="s"), ExtraKeys(lora=("sql", ""))
    talk.say(batch(stored(prompt(21), contract=RANDOM, extra=salted)))
    talk.say(batch(stored(prompt(22), contract=RANDOM, extra=adapted)))
    image = stored(prompt(23), contract=RANDOM)
    image.extra_keys = [None, [["image", 0]], None]
    first_image = stored(prompt(24), contract=RANDOM)
    first_image.extra_keys = [[["image", 0]], None, None]
    talk.say(batch(image, first_image))

    assert talk.num_matched(prompt(21), salted) == 3
    assert talk.num_matched(prompt(22), adapted) == 3
    assert talk.num_matched(prompt(23)) == 1
    assert talk.num_matched(prompt(24)) == 0
    assert talk.stream.counters.blocks.num_untranslated == 5


def test_a_restart_ends_translation() -> None:
    """The next process may be one whose hashes can be computed."""
    talk = translating()
    talk.history = [batch(stored(prompt(1)))]
    talk.join()

    assert talk.stream.contract == CONTRACT
    assert talk.stream.state == "exact"


# -- trust -----------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_read_degrades() -> None:
    """What it said is lost until everything is read or begins again."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))), b"garbage")

    assert talk.stream.state_and_reason() == ("degraded", "a batch was not understood")
    assert talk.stream.counters.num_undecodable == 1
    talk.say(batch(AllBlocksCleared()))
    assert talk.stream.state == "exact"


def test_tokens_that_are_none_degrade() -> None:
    """They are skipped until they must be read: to verify the contract."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))))
    for number in range(2 * VERIFY_EVERY):
        talk.say(BAD_TOKENS if number == VERIFY_EVERY else batch(stored(prompt(number + 2))))
    talk.stream._blocks.search._num_until_verified = 0
    talk.say(BAD_TOKENS)

    assert talk.stream.state_and_reason() == ("degraded", "a batch was not understood")
    assert talk.num_matched(prompt(3)) == 3


def test_after_a_batch_that_cannot_be_read_history_is_read_again() -> None:
    """Sooner or later, ever later; what the engine says by then counts."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))), b"garbage", batch(stored(prompt(2))))
    talk.stream.tick(100.0)
    assert talk.stream.wanted_replay is None
    talk.stream.tick(101.0)
    assert talk.stream.wanted_replay == 0
    talk.replay()
    assert talk.stream.state == "degraded"
    talk.stream.tick(101.1)
    assert talk.stream.wanted_replay is None
    talk.history[1] = batch(stored(prompt(3)))
    talk.stream.tick(104.0)
    talk.replay()

    assert talk.stream.state_and_reason() == ("exact", "")
    assert talk.matched(range(1, 4)) == [3, 3, 3]


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_whatever_comes_a_later_sane_batch_is_applied(poison: bytes) -> None:
    """Each is counted once, and changes nothing."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))), poison, batch(stored(prompt(2))))

    assert talk.stream.state == "degraded"
    assert talk.stream.counters.num_undecodable == 1
    assert talk.matched([1, 2]) == [3, 3]


def test_a_stream_of_garbage_is_blind() -> None:
    """It is announced as not understood, not taken for an idle engine."""
    talk = Talk().join()
    talk.say(b"garbage")

    assert talk.stream.state_and_reason() == ("blind", "its events are not understood")


def test_what_was_guessed_goes_when_the_engine_speaks() -> None:
    """Approximation ends with the first batch."""
    talk = Talk().join()
    talk.index.remember(R1, CONTRACT.extend(None, prompt(7))[0], 100)
    talk.say(batch(stored(prompt(1))))

    assert talk.matched([1, 7]) == [3, 0]


def test_a_suspect_stream_reads_history_again() -> None:
    """The audit found predictions wrong: until the replay is through no match counts."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))))
    talk.index.store(R1, CONTRACT.extend(None, prompt(2))[0])
    talk.stream.mark_suspect("2 of 10 predictions were right")

    assert talk.stream.is_suspect
    assert talk.stream.state_and_reason() == ("degraded", "2 of 10 predictions were right")
    talk.replay()
    assert talk.matched([1, 2]) == [3, 0]
    assert talk.stream.state == "exact"


def test_a_suspect_stream_without_replay_forgets() -> None:
    """No replay: begin with nothing."""
    talk = Talk(has_replay=False)
    talk.say(batch(stored(prompt(1))))
    talk.stream.mark_suspect("wrong")

    assert not talk.stream.is_suspect
    assert talk.num_matched(prompt(1)) == 0
    assert talk.stream.state == "degraded"


def test_a_publisher_gone_for_long_leaves_the_candidate_blind() -> None:
    """For a while its blocks count; then none does."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))))
    talk.stream.disconnected(100.0)
    talk.stream.disconnected(110.0)
    talk.stream.tick(100.0 + BLIND_AFTER_S - 1)

    assert talk.stream.state_and_reason() == ("degraded", "publisher unreachable")
    assert talk.num_matched(prompt(1)) == 3
    talk.stream.tick(100.0 + BLIND_AFTER_S)
    assert talk.stream.state_and_reason() == ("blind", "event stream lost")
    assert talk.num_matched(prompt(1)) == 0
    talk.join()
    assert talk.stream.state == "exact"
    assert talk.num_matched(prompt(1)) == 3


def test_a_quiet_check_of_an_engine_that_goes_on_changes_nothing() -> None:
    """Its last batch comes back as it was; a second check is not asked on top of the first."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1))))
    talk.stream.verify()
    talk.stream.verify()
    epoch = talk.stream.epoch
    talk.replay()

    assert talk.stream.epoch == epoch
    assert talk.num_matched(prompt(1)) == 3


def test_evictions_in_a_row_are_each_applied() -> None:
    """vLLM reports each evicted block by an event of its own: of either tier, or of two copies."""
    talk = Talk().join()
    talk.say(batch(stored(prompt(1)), stored(prompt(2)), stored(prompt(2))))
    talk.say(batch(stored(prompt(1), medium="CPU")))
    first, second = hashes(prompt(1)), hashes(prompt(2))
    talk.say(
        batch(
            removed(first[2:]),
            removed(first[1:2]),
            removed(second[2:]),
            removed(first[2:], medium="CPU"),
            removed(first[1:2], medium="CPU"),
            removed(second[2:]),
            removed(second[1:2]),
            removed([12345]),
            stored(prompt(3)),
            removed(first[:1]),
        )
    )

    held = {tier: list(copies.values()) for tier, copies in talk.index.held(R1).items()}
    assert held == {"gpu": [2, 1, 1, 1, 1], "cpu": [1]}
    assert talk.matched([1, 2, 3]) == [0, 2, 3]
    assert talk.stream.counters.blocks.num_removed == 9
    assert talk.stream.counters.blocks.num_missing == 1
