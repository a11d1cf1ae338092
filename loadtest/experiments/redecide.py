"""Decide recorded snapshots again: by the recorded policy, and by another one.

Policies are pure, so the recorded policy must choose as it did. If it does not, the record is of
another version, or of other parameters. With prefill and decode apart a record has two decisions,
and the other policy is asked about the prompt's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from loadtest.experiments.records import RecordsError, lines_of
from loadtest.pages import Table, on_terminal
from loadtest.words import amount, percent
from policies.cost import candidate_costs
from policies.policy import Policy
from policies.registry import create
from policies.view import CandidateCost, CandidateId, Decision, Snapshot
from router.records.record import SCHEMA, DecisionRecord

_NAMED: Final = 5
_QUANTILES: Final = (0.1, 0.5, 0.9, 0.99)

_Choice = tuple[str, dict[str, Any], Snapshot, Decision]
"""A policy, its parameters, what it was asked and what it chose."""


class Disagreement(Struct, frozen=True, kw_only=True):
    """A record whose policy decides otherwise now."""

    file: str
    line: int
    request_id: str
    policy: str
    recorded: CandidateId
    again: CandidateId | None  # None: the policy or its parameters are unknown
    reason: str


class WhatIf(Struct, frozen=True, kw_only=True):
    """Another policy on the live one's snapshots; means per request, times in milliseconds.

    All times are predictions, made the same way for both choices, on the live policy's caches and
    queues. `regret_ms` is the live choice's predicted TTFT minus the other's: positive if the other
    is faster.
    """

    policy: str
    num_decisions: int
    agreement: float
    ttft_ms: float
    live_ttft_ms: float
    uncached_tokens: float
    live_uncached_tokens: float
    fetched_tokens: float
    live_fetched_tokens: float
    regret_ms: float
    regret_quantiles: dict[str, float]  # p10, p50, p90, p99


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
    kinds: Counter[str] = Counter()
    by_policy: Counter[str] = Counter()
    disagreements: list[Disagreement] = []
    asked: list[tuple[CandidateCost, CandidateCost]] = []
    for file, line, record in _read(files, skip_bad):
        if record is None:
            kinds["bad"] += 1
            continue
        choices = _choices(record)
        by_policy.update({name for name, *_ in choices})
        kind, found = _compared(choices)
        kinds[kind] += 1
        if found is not None and len(disagreements) < _NAMED:
            policy, recorded, again, reason = found
            disagreements.append(
                Disagreement(
                    file=str(file),
                    line=line,
                    request_id=record.request_id,
                    policy=policy,
                    recorded=recorded.candidate,
                    again=None if again is None else again.candidate,
                    reason=reason,
                )
            )
        if other is not None and record.by_policy is not None:
            snapshot, decision = record.by_policy
            costs = {cost.id: cost for cost in candidate_costs(snapshot)}
            asked.append((costs[other.decide(snapshot).candidate], costs[decision.candidate]))
    num_bad = kinds.pop("bad", 0)
    if not kinds:
        raise RecordsError("no decision record in these files")
    return Redecided(
        num_records=kinds.total(),
        num_bad=num_bad,
        num_same=kinds["same"],
        num_other_costs=kinds["other costs"],
        num_other_choice=kinds["other choice"],
        num_unknown=kinds["unknown"],
        by_policy=dict(by_policy),
        disagreements=tuple(disagreements),
        what_if=_what_if(other_label, asked) if asked else None,
    )


def _choices(record: DecisionRecord) -> list[_Choice]:
    """List the decisions of a record: the answer's place, and the prompt's if it has its own."""
    choices = [(record.policy, record.policy_params, record.snapshot, record.decision)]
    prefill = record.prefill
    if prefill is not None and prefill.snapshot is not None and prefill.decision is not None:
        params = prefill.policy_params
        choices.append((prefill.policy or "", params, prefill.snapshot, prefill.decision))
    return choices


def _compared(
    choices: list[_Choice],
) -> tuple[str, tuple[str, Decision, Decision | None, str] | None]:
    """Decide again; return the kind of the result, and the first disagreement."""
    for name, params, snapshot, recorded in choices:
        try:
            policy = _made(name, msgspec.json.encode(params, order="sorted"))
        except ValueError as exc:
            return "unknown", (name, recorded, None, str(exc))
        again = policy.decide(snapshot)
        if again.candidate != recorded.candidate:
            return "other choice", (name, recorded, again, "another choice")
        if again != recorded:
            reason = "the same choice, with other costs or another reason"
            return "other costs", (name, recorded, again, reason)
    return "same", None


@lru_cache(maxsize=256)
def _made(name: str, params: bytes) -> Policy:
    return create(name, msgspec.json.decode(params))


def _what_if(label: str, asked: list[tuple[CandidateCost, CandidateCost]]) -> WhatIf:
    """Sum up the other policy's choices, each with the live one."""
    import numpy as np

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    regrets = [live.ttft_ms - other.ttft_ms for other, live in asked]
    quantiles = np.quantile(regrets, _QUANTILES).tolist()
    return WhatIf(
        policy=label,
        num_decisions=len(asked),
        agreement=mean(other.id == live.id for other, live in asked),
        ttft_ms=mean(other.ttft_ms for other, _ in asked),
        live_ttft_ms=mean(live.ttft_ms for _, live in asked),
        uncached_tokens=mean(other.num_uncached_tokens for other, _ in asked),
        live_uncached_tokens=mean(live.num_uncached_tokens for _, live in asked),
        fetched_tokens=mean(other.num_fetched_tokens for other, _ in asked),
        live_fetched_tokens=mean(live.num_fetched_tokens for _, live in asked),
        regret_ms=mean(regrets),
        regret_quantiles={f"p{q:.0%}"[:-1]: v for q, v in zip(_QUANTILES, quantiles, strict=True)},
    )


def _read(
    files: Iterable[Path], skip_bad: bool
) -> Iterator[tuple[Path, int, DecisionRecord | None]]:
    """Yield the records with file and line; None: the line is left out."""
    for file in files:
        for number, line in lines_of(file):
            if not line.strip():
                continue
            try:
                yield file, number, _decoded(line)
            except (msgspec.DecodeError, ValueError) as exc:
                if not skip_bad and line.endswith(b"\n"):
                    raise RecordsError(
                        f"{file}:{number}: {exc}; leave such lines out with --skip-bad"
                    ) from exc
                yield file, number, None


_decode = msgspec.json.Decoder(DecisionRecord).decode


def _decoded(line: bytes) -> DecisionRecord:
    record = _decode(line)
    if not 1 <= record.schema <= SCHEMA:
        raise ValueError(f"field `schema`: version {record.schema} is unknown (1 to {SCHEMA})")
    if record.schema == 1:
        record = msgspec.convert(_of_each(msgspec.json.decode(line)), DecisionRecord)
    fields = ("decision.candidate", "prefill.decision.candidate")
    for field, (_, _, snapshot, decision) in zip(fields, _choices(record), strict=False):
        if decision.candidate not in {view.id for view in snapshot.replicas}:
            raise ValueError(f"field `{field}`: not in the snapshot")
    return record


def _of_each(record: dict[str, Any]) -> dict[str, Any]:
    """Copy the pool's tokens to each candidate; records of schema 1 have them once for all."""
    for snapshot in (record["snapshot"], (record.get("prefill") or {}).get("snapshot")):
        if snapshot is not None:
            for view in snapshot["replicas"]:
                view.setdefault("num_pool_tokens", snapshot.get("num_pool_tokens"))
    return record


def show(found: Redecided, console: Console) -> None:
    """Print what deciding again gave."""
    console.print(
        f"{found.num_records:,} records: {found.num_same:,} decided as they were, "
        f"{found.num_other_costs:,} with other costs, {found.num_other_choice:,} otherwise, "
        f"{found.num_unknown:,} by a policy that is not here"
    )
    if found.num_bad:
        console.print(f"{found.num_bad:,} lines were left out: no decision records")
    for one in found.disagreements:
        again = "nothing" if one.again is None else one.again
        text = (
            f"{one.file}:{one.line}: request {one.request_id}: {one.policy} chose "
            f"{one.recorded}, now {again} ({one.reason})"
        )
        console.print(Text(text, style="red"))
    if found.agrees:
        console.print(Text("every record was decided again as it was", style="green"))
    if found.what_if is not None:
        console.print()
        console.print(on_terminal(_table(found.what_if), folds=(7,)))
        console.print("Predictions, the live choice's in brackets. Regret: by how much the other")
        console.print("policy's choice was predicted to be sooner.")


def _table(other: WhatIf) -> Table:
    """Lay out another policy's figures, with the live ones in brackets."""
    row = (
        other.policy,
        f"{other.num_decisions:,}",
        percent(other.agreement),
        f"{amount(other.ttft_ms, 'ms')} ({amount(other.live_ttft_ms, 'ms')})",
        f"{other.uncached_tokens:,.0f} ({other.live_uncached_tokens:,.0f})",
        f"{other.fetched_tokens:,.0f} ({other.live_fetched_tokens:,.0f})",
        amount(other.regret_ms, "ms"),
        ", ".join(f"{value:,.0f}" for value in other.regret_quantiles.values()),
    )
    return Table(
        head=("policy", "decisions", "same choice", "first token", "computed tokens",
              "fetched tokens", "regret", "regret P10, P50, P90, P99, ms"),
        rows=(row,),
        numeric=tuple(range(1, 8)),
    )  # fmt: skip
