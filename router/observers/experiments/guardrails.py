"""Guardrails: the evidence against each bound of each variant, unit by unit.

    errors       every request is an observation, so that a burst of failures stops a variant
    ttft         the share of first tokens that are late, tested against 1 - ttft_quantile
    ttft_ratio   pairs of one first-token time of the variant and one of the control: the share of
                 pairs in which the variant's is more than the ratio times longer, against 1/2

Requests of one unit (session or time slot) are similar, so first tokens count once for each unit.
The answer that counts is drawn beforehand: the first with probability 1/2, the second with 1/4, and
so on. The control variant has the absolute bounds only. Each guardrail of each variant
is tested at alpha divided by their number, so alpha holds for all together. Each router tests the
requests that it served itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import log

from msgspec import Struct

from policies.hashing import mix
from router.base.bounded import Bounded
from router.config.experiments import Experiment
from router.observers.experiments.evidence import Evidence

MAX_UNITS = 50_000
"""Units whose answers are counted; beyond that, the least recent are removed."""

_MAX_UNPAIRED = 1_000
_LAST_ANSWER = 8


class Breach(Struct, frozen=True, kw_only=True):
    """A variant broke a bound."""

    arm: str
    guardrail: str  # errors | ttft | ttft_ratio
    reason: str


class Reading(Struct, frozen=True, kw_only=True):
    """The evidence against one variant at one guardrail; it is stopped at `needed`."""

    arm: str
    guardrail: str
    bound: float  # of the mean below
    mean: float | None
    num_samples: int
    log_wealth: float
    needed: float


class ExperimentGuard:
    """All guardrails of one experiment."""

    __slots__ = (
        "_answers",
        "_control",
        "_evidence",
        "_needed",
        "_rules",
        "_unit_noun",
        "_unpaired",
    )

    def __init__(self, experiment: Experiment) -> None:
        rules = self._rules = experiment.guardrails
        names = [arm.name for arm in experiment.arms]
        self._control = experiment.control_arm
        self._evidence: dict[tuple[str, str], Evidence] = {}  # by guardrail and variant
        for name in names:
            if rules.max_error_rate is not None:
                self._evidence["errors", name] = Evidence(rules.max_error_rate)
            if rules.max_ttft_s is not None:
                self._evidence["ttft", name] = Evidence(1 - rules.ttft_quantile)
            if rules.max_ttft_ratio is not None and name != self._control:
                self._evidence["ttft_ratio", name] = Evidence(0.5)
        self._unpaired: dict[str, tuple[deque[float], deque[float]]] = {
            name: (deque(maxlen=_MAX_UNPAIRED), deque(maxlen=_MAX_UNPAIRED))
            for guardrail, name in self._evidence
            if guardrail == "ttft_ratio"
        }
        self._needed = log(max(1, len(self._evidence)) / rules.alpha)
        self._answers: Bounded[str, int] = Bounded(MAX_UNITS)  # of each unit, so far
        self._unit_noun = "slots" if experiment.design == "switchback" else "sessions"

    def ended(self, arm: str, is_error: bool) -> Breach | None:
        """Record the end of a request."""
        return self._add("errors", arm, float(is_error))

    def answered(self, arm: str, unit: str, ttft_s: float) -> Breach | None:
        """Record the first-token time of a request that counts."""
        max_s = self._rules.max_ttft_s
        if (max_s is None and not self._unpaired) or not self._is_drawn(unit):
            return None
        verdict = self._add("ttft", arm, float(ttft_s > max_s)) if max_s is not None else None
        if verdict is not None:
            return verdict
        for treated, (own, control) in self._unpaired.items():
            if arm in (treated, self._control):
                (own if arm == treated else control).append(ttft_s)
                verdict = verdict or self._pair(treated, own, control)
        return verdict

    def readings(self) -> Iterator[Reading]:
        """Return the evidence at every guardrail."""
        for (guardrail, arm), evidence in self._evidence.items():
            yield Reading(
                arm=arm,
                guardrail=guardrail,
                bound=evidence.bound,
                mean=evidence.mean,
                num_samples=evidence.num,
                log_wealth=evidence.log_wealth,
                needed=self._needed,
            )

    def _is_drawn(self, unit: str) -> bool:
        """Count a unit's answer; return whether it is the one that counts."""
        number = self._answers.get(unit, 0) + 1
        self._answers.put(unit, number)
        return number == drawn_answer(unit)

    def _pair(self, arm: str, own: deque[float], control: deque[float]) -> Breach | None:
        if not own or not control:
            return None
        value_s, limit_s = own.popleft(), control.popleft() * (self._rules.max_ttft_ratio or 1.0)
        return self._add("ttft_ratio", arm, 0.5 if value_s == limit_s else float(value_s > limit_s))

    def _add(self, guardrail: str, arm: str, value: float) -> Breach | None:
        evidence = self._evidence.get((guardrail, arm))
        if evidence is None:
            return None
        evidence.add(value)
        if evidence.num < self._rules.min_samples or evidence.log_wealth < self._needed:
            return None
        return Breach(arm=arm, guardrail=guardrail, reason=self._reason(guardrail, evidence))

    def _reason(self, guardrail: str, evidence: Evidence) -> str:
        share = f"{evidence.mean or 0.0:.1%} of {evidence.num}"
        rules, noun = self._rules, self._unit_noun
        if guardrail == "errors":
            return f"{share} requests failed; max_error_rate is {rules.max_error_rate:g}"
        if guardrail == "ttft":
            return (
                f"{share} {noun}' first tokens came after {rules.max_ttft_s:g} s; at most "
                f"{1 - rules.ttft_quantile:.1%} may"
            )
        return (
            f"in {share} pairs of {noun} the first token took more than "
            f"{rules.max_ttft_ratio:g} times the control variant's"
        )


def drawn_answer(unit: str) -> int:
    """Draw which answer of a unit counts: k with probability 1 in 2 to the k."""
    bits = mix(int(unit, 16))
    number = 1
    while number < _LAST_ANSWER and bits & 1:
        bits >>= 1
        number += 1
    return number
