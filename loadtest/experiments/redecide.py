"""Decide recorded snapshots again: by the recorded policy, and by another one as a late shadow.

Policies are pure, so the recorded policy must choose as it did. If it does not, the record is of
another version, or of other parameters. With prefill and decode apart a record has two decisions,
and the other policy is asked about the prompt's.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from msgspec import Struct

from loadtest.experiments.bad_lines import RecordsError
from loadtest.experiments.shadows import QUANTILES, WhatIf, named
from policies.cost import candidate_costs
from policies.policy import Policy
from policies.registry import create
from policies.view import CandidateCost, CandidateId, Decision, Snapshot
from router.records.record import SCHEMA

_NAMED: Final = 5


class _Choice(Struct, frozen=True, kw_only=True):
    """The inputs of one decision, and the decision."""

    policy: str
    policy_params: dict[str, Any] = {}
    snapshot: Snapshot
    decision: Decision


class _Prefill(Struct, frozen=True, kw_only=True):
    """The decision about a prompt that is computed apart; None: there was none."""

    policy: str | None = None
    policy_params: dict[str, Any] = {}
    snapshot: Snapshot | None = None
    decision: Decision | None = None


class _Decided(_Choice, frozen=True, kw_only=True):
    """The parts of a record that its decisions need."""

    schema: int
    request_id: str
    prefill: _Prefill | None = None

    @property
    def prompt(self) -> _Choice | None:
        """Return the prompt's own decision; None: there is none."""
        prefill = self.prefill
        if prefill is None or prefill.snapshot is None or prefill.decision is None:
            return None
        return _Choice(
            policy=prefill.policy or "",
            policy_params=prefill.policy_params,
            snapshot=prefill.snapshot,
            decision=prefill.decision,
        )


class Disagreement(Struct, frozen=True, kw_only=True):
    """A record whose policy decides otherwise now."""

    file: str
    line: int
    request_id: str
    policy: str
    recorded: CandidateId
    again: CandidateId | None  # None: the policy or its parameters are unknown
    reason: str


class Redecided(Struct, frozen=True, kw_only=True):
    """The result of deciding again."""

    schema: str = "warmroute.redecided/1"
    num_records: int
    num_bad: int
    num_same: int
    num_other_costs: int  # the same choice, but other costs
    num_other_choice: int
    num_unknown: int  # no such policy here
    by_policy: dict[str, int]
    disagreements: tuple[Disagreement, ...]  # the first few
    what_if: WhatIf | None

    @property
    def agrees(self) -> bool:
        """Return whether every record was decided again as it was."""
        return self.num_same == self.num_records


def redecide(
    files: Iterable[Path],
    *,
    other: Policy | None = None,
    other_label: str = "",
    skip_bad: bool = False,
) -> Redecided:
    """Decide every record again.

    Args:
        files: Of decision records, plain or .gz.
        other: A policy to ask as well.
        other_label: What to call it.
        skip_bad: Leave out lines that are no records; a torn last line is always left out.

    Raises:
        RecordsError: a line is no record, or there are no records.
    """
    tally = _Tally(other)
    for file, number, record in _read(files, skip_bad, tally):
        tally.add(file, number, record)
    if not tally.num_records:
        raise RecordsError("no decision record in these files")
    return tally.result(other_label)


class _Tally:
    """Counts the records."""

    def __init__(self, other: Policy | None) -> None:
        self._other = other
        self._pairs: list[tuple[bool, float, float, int, int, int, int]] = []
        self._disagreements: list[Disagreement] = []
        self._by_policy: dict[str, int] = {}
        self.num_records = 0
        self.num_bad = 0
        self._num_same = self._num_other_costs = self._num_other_choice = self._num_unknown = 0

    def add(self, file: Path, line: int, record: _Decided) -> None:
        """Decide one record again: the answer's place, and the prompt's if it has its own."""
        self.num_records += 1
        prompt = record.prompt
        choice: _Choice = record
        again, reason = _again(choice)
        if prompt is not None and again == record.decision:
            choice = prompt
            again, reason = _again(choice)
        for policy in dict.fromkeys([record.policy, (prompt or record).policy]):
            self._by_policy[policy] = self._by_policy.get(policy, 0) + 1
        if again is None:
            self._num_unknown += 1
        elif again == choice.decision:
            self._num_same += 1
        elif again.candidate == choice.decision.candidate:
            self._num_other_costs += 1
            reason = "the same choice, with other costs or another reason"
        else:
            self._num_other_choice += 1
            reason = "another choice"
        if again != choice.decision and len(self._disagreements) < _NAMED:
            self._disagreements.append(
                Disagreement(
                    file=str(file),
                    line=line,
                    request_id=record.request_id,
                    policy=choice.policy,
                    recorded=choice.decision.candidate,
                    again=None if again is None else again.candidate,
                    reason=reason,
                )
            )
        if self._other is not None and (prompt is not None or record.prefill is None):
            self._pairs.append(_pair(prompt or record, self._other))

    def result(self, label: str) -> Redecided:
        """Return the result."""
        return Redecided(
            num_records=self.num_records,
            num_bad=self.num_bad,
            num_same=self._num_same,
            num_other_costs=self._num_other_costs,
            num_other_choice=self._num_other_choice,
            num_unknown=self._num_unknown,
            by_policy=self._by_policy,
            disagreements=tuple(self._disagreements),
            what_if=_what_if(label, self._pairs) if self._pairs else None,
        )


def _again(record: _Choice) -> tuple[Decision | None, str]:
    try:
        policy = _made(record.policy, msgspec.json.encode(record.policy_params, order="sorted"))
    except ValueError as exc:
        return None, str(exc)
    return policy.decide(record.snapshot), ""


@lru_cache(maxsize=256)
def _made(name: str, params: bytes) -> Policy:
    return create(name, msgspec.json.decode(params))


def _pair(record: _Choice, other: Policy) -> tuple[bool, float, float, int, int, int, int]:
    """Price both choices: agreement, then first-token times, uncached, fetched."""
    chosen = other.decide(record.snapshot).candidate
    costs: dict[CandidateId, CandidateCost] = {
        cost.id: cost for cost in candidate_costs(record.snapshot)
    }
    live, ours = costs[record.decision.candidate], costs[chosen]
    return (
        live.id == ours.id,
        ours.ttft_ms,
        live.ttft_ms,
        ours.num_uncached_tokens,
        live.num_uncached_tokens,
        ours.num_fetched_tokens,
        live.num_fetched_tokens,
    )


def _what_if(label: str, pairs: list[tuple[bool, float, float, int, int, int, int]]) -> WhatIf:
    import numpy as np

    table = np.asarray(pairs, dtype=float)
    means = table.mean(0).tolist()  # plain floats, for JSON
    regret = table[:, 2] - table[:, 1]
    return WhatIf(
        policy=label,
        num_decisions=len(pairs),
        agreement=means[0],
        ttft_ms=means[1],
        live_ttft_ms=means[2],
        uncached_tokens=means[3],
        live_uncached_tokens=means[4],
        fetched_tokens=means[5],
        live_fetched_tokens=means[6],
        regret_ms=float(regret.mean()),
        regret_quantiles=named(np.quantile(regret, QUANTILES).tolist()),
    )


def _read(
    files: Iterable[Path], skip_bad: bool, tally: _Tally
) -> Iterator[tuple[Path, int, _Decided]]:
    decoder = msgspec.json.Decoder(_Decided)
    for file in files:
        with file.open("rb") as raw:
            lines: IO[bytes] = gzip.open(raw) if file.suffix == ".gz" else raw  # type: ignore[assignment]
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = _decoded(decoder, line)
                except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as exc:
                    tally.num_bad += 1
                    is_torn = not line.endswith(b"\n")
                    if not (skip_bad or is_torn):
                        raise RecordsError(
                            f"{file}:{number}: {exc}; leave such lines out with --skip-bad"
                        ) from exc
                    continue
                yield file, number, record


def _decoded(decoder: msgspec.json.Decoder[_Decided], line: bytes) -> _Decided:
    record = decoder.decode(line)
    if record.schema == 1:
        record = msgspec.convert(_of_each(msgspec.json.decode(line)), _Decided)
    if not 1 <= record.schema <= SCHEMA:
        raise ValueError(f"field `schema`: version {record.schema} is unknown (1 to {SCHEMA})")
    for choice, field in ((record, ""), (record.prompt, "prefill.")):
        if choice is None:
            continue
        if choice.decision.candidate not in {view.id for view in choice.snapshot.replicas}:
            raise ValueError(f"field `{field}decision.candidate`: not in the snapshot")
    return record


def _of_each(record: dict[str, Any]) -> dict[str, Any]:
    """Give each candidate the pool's tokens, which records of schema 1 have once for all."""
    for snapshot in (record["snapshot"], (record.get("prefill") or {}).get("snapshot")):
        if snapshot is not None:
            for view in snapshot["replicas"]:
                view.setdefault("num_pool_tokens", snapshot.get("num_pool_tokens"))
    return record
