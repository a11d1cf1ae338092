"""loadtest.experiments.redecide: the same snapshot, the same policy, the same decision."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from loadtest.experiments import RecordsError, redecide
from policies import CandidateId, create
from router.records.record import DecisionRecord, PrefillRecord
from tests.loadtest.experiments.samples import CONTROL, TREATMENT, Arm, Scene, records, write

PARAMS = Arm(name="other", policy="kv_aware", params={"alpha": 0.5}, share=lambda at: 1 / 3)
MADE = records(
    Scene(
        arms=(
            replace(CONTROL, share=lambda at: 1 / 3),
            replace(TREATMENT, policy="power_of_two", share=lambda at: 1 / 3),
            PARAMS,
        ),
        num_sessions=60,
    )
)


def test_every_record_is_decided_as_it_was(tmp_path: Path) -> None:
    """Drawn ties, random choices and parameters included, from any file."""
    plain = write(tmp_path / "a.jsonl", MADE[::2])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(write(tmp_path / "b", MADE[1::2]).read_bytes()))

    found = redecide([plain, packed])

    assert found.agrees
    assert found.num_same == found.num_records == len(MADE)
    assert set(found.by_policy) == {"least_loaded", "power_of_two", "kv_aware"}


def test_disagreements_are_named(tmp_path: Path) -> None:
    """A changed choice, changed costs and an unknown policy are distinguished."""

    def elsewhere(record: DecisionRecord) -> DecisionRecord:
        other = next(v.id for v in record.snapshot.replicas if v.id != record.decision.candidate)
        return replace(record, decision=replace(record.decision, candidate=CandidateId(other)))

    changed = [
        elsewhere(MADE[0]),
        replace(MADE[1], decision=replace(MADE[1].decision, reason="because")),
        replace(MADE[2], policy="kv_awre"),
        *MADE[3:],
    ]
    file = write(tmp_path / "a.jsonl", changed)

    found = redecide([file])

    assert not found.agrees
    assert (found.num_other_choice, found.num_other_costs, found.num_unknown) == (1, 1, 1)
    assert [one.line for one in found.disagreements] == [1, 2, 3]
    assert found.disagreements[0].again == MADE[0].decision.candidate
    assert "did you mean 'kv_aware'" in found.disagreements[2].reason


def test_another_policy_is_asked_on_the_same_snapshots(tmp_path: Path) -> None:
    """What it would have chosen is priced as the live choice is."""
    file = write(tmp_path / "a.jsonl", MADE)
    soonest = create("min_ttft")

    found = redecide([file], other=soonest, other_label="min_ttft")

    what_if = found.what_if
    assert what_if is not None
    chosen = [soonest.decide(record.snapshot).candidate for record in MADE]
    agreement = np.mean([c == r.decision.candidate for c, r in zip(chosen, MADE, strict=True)])
    assert what_if.agreement == pytest.approx(agreement)
    assert what_if.regret_ms == pytest.approx(what_if.live_ttft_ms - what_if.ttft_ms)
    assert what_if.regret_quantiles["p10"] >= 0  # nothing is sooner than the soonest


def test_both_halves_are_decided_again(tmp_path: Path) -> None:
    """Where prompts are computed apart, another policy is asked about these."""
    decode, made = create("decode_load"), [r for r in MADE if r.policy == MADE[0].policy][:20]
    policy = create(made[0].policy, made[0].policy_params)
    apart = [
        replace(
            record,
            policy=decode.name,
            policy_params={},
            decision=decode.decide(record.snapshot),
            prefill=PrefillRecord(
                result="remote",
                why="chosen",
                here_ms=2.0,
                there_ms=1.0,
                transfer="store",
                candidate=record.decision.candidate,
                policy=record.policy,
                policy_params=record.policy_params,
                snapshot=record.snapshot,
                decision=record.decision,
            ),
        )
        for record in made
    ]
    file = write(tmp_path / "a.jsonl", apart)

    found = redecide([file], other=policy, other_label="the same")

    assert found.agrees
    assert found.by_policy == {"decode_load": len(made), policy.name: len(made)}
    assert found.what_if is not None
    assert found.what_if.agreement == 1.0
    assert found.what_if.num_decisions == len(made)

    other = replace(made[0].decision, candidate=CandidateId("gone"))
    changed = replace(apart[0].prefill, decision=other)
    write(tmp_path / "a.jsonl", [replace(apart[0], prefill=changed)])
    with pytest.raises(RecordsError, match=r"prefill.decision.candidate"):
        redecide([file])


def test_older_records_are_decided_again_as_they_were(tmp_path: Path) -> None:
    """In those of schema 1 what the pool had is said once, beside the candidates."""
    made = [msgspec.to_builtins(record) for record in MADE]
    assert len({view.num_pool_tokens for view in MADE[0].snapshot.replicas} - {None}) == 1
    for record in made:
        record["schema"] = 1
        for view in record["snapshot"]["replicas"]:
            record["snapshot"]["num_pool_tokens"] = view.pop("num_pool_tokens")
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in made))

    assert redecide([file]).agrees


def test_bad_lines_are_named_or_skipped(tmp_path: Path) -> None:
    """Foreign lines, unknown versions and impossible candidates have file and line."""
    file = write(tmp_path / "a.jsonl", MADE[:3])
    text = file.read_text()
    gone = replace(MADE[3], decision=replace(MADE[3].decision, candidate=CandidateId("gone")))
    gone_text = write(tmp_path / "gone", [gone]).read_text()

    for bad, said in (
        ("{}\n", "missing required field"),
        (text.splitlines()[0].replace('"schema":2', '"schema":9') + "\n", "version 9"),
        (gone_text, r"decision\.candidate"),
    ):
        file.write_text(text + bad)
        with pytest.raises(RecordsError, match=rf"a\.jsonl:4: .*{said}"):
            redecide([file])
        assert redecide([file], skip_bad=True).num_bad == 1
    file.write_text(text + text[:100])
    assert redecide([file]).num_bad == 1
    file.write_text("\n")
    with pytest.raises(RecordsError, match="no decision record"):
        redecide([file])
