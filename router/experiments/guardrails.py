"""What stops a variant: evidence against each of its bounds, unit by unit.

    errors       every request is an observation: a burst of failures is what one wants to stop
    ttft         is the quantile above its bound: the share of late first tokens against 1 - q
    ttft_ratio   is the variant's median above r times the control's: pairs of one value of the
    variant
                 and one of the control, the share of pairs in which the variant's is more than r
                 times the control's, against 1/2

Requests of one conversation are alike (its length, its replica), those of one time slot too: as
many observations they would stop good variants. So for first tokens a unit counts once: of a
session one turn, drawn beforehand (the first with probability 1/2, the second with 1/4, …), of a
slot its share of late ones, or its mean. The control variant is held to the absolute bounds only.
Each guardrail of each variant is tested at alpha over their number, so alpha holds for all
together; each router tests what it served itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from math import log

from msgspec import Struct

from policies.hashing import mix
from router.experiments.definition import Experiment
from router.experiments.evidence import Evidence

MAX_UNITS = 50_000
"""Sessions whose turns are counted; of more, the least recent are forgotten."""

MAX_UNPAIRED = 1_000
_LAST_TURN = 8


class Verdict(Struct, frozen=True, kw_only=True):
    """An arm broke a bound."""

    arm: str
    guardrail: str  # errors | ttft | ttft_ratio
    reason: str


class Reading(Struct, frozen=True, kw_only=True):
    """How much speaks against one arm at one guardrail; it is stopped at `needed`."""

    arm: str
    guardrail: str
    bound: float  # of the mean below
    mean: float | None
    num_samples: int
    log_wealth: float
    needed: float


class Guard:
    """All guardrails of one experiment."""

    __slots__ = (
        "_closed",
        "_control",
        "_errors",
        "_needed",
        "_ratio",
        "_rules",
        "_slots",
        "_ttft",
        "_turns",
        "_unpaired",
    )

    def __init__(self, experiment: Experiment) -> None:
        rules = self._rules = experiment.guardrails
        names = [arm.name for arm in experiment.arms]
        self._control = experiment.control_arm
        treated = [name for name in names if name != self._control]
        self._errors = _against(rules.max_error_rate, names, rules.max_error_rate)
        self._ttft = _against(rules.max_ttft_s, names, 1 - rules.ttft_quantile)
        self._ratio = _against(rules.max_ttft_ratio, treated, 0.5)
        self._unpaired: dict[str, tuple[deque[float], deque[float]]] = {
            name: (deque(maxlen=MAX_UNPAIRED), deque(maxlen=MAX_UNPAIRED)) for name in self._ratio
        }
        num_tests = len(self._errors) + len(self._ttft) + len(self._ratio)
        self._needed = log(max(1, num_tests) / rules.alpha)
        self._turns: OrderedDict[str, int] | None = (
            None if experiment.design == "switchback" else OrderedDict()
        )
        self._slots: dict[int, _Slot] = {}  # of a switchback, still open
        self._closed = -1

    @property
    def is_idle(self) -> bool:
        """Whether there is no guardrail at all."""
        return not (self._errors or self._ttft or self._ratio)

    def ended(self, arm: str, is_error: bool) -> Verdict | None:
        """Take in how a request ended."""
        errors = self._errors.get(arm)
        if errors is None:
            return None
        errors.add(float(is_error))
        return self._verdict(arm, "errors", errors)

    def answered(self, arm: str, unit: str, slot: int | None, ttft_s: float) -> Verdict | None:
        """Take in a first-token time; those of washed-out requests do not belong here."""
        if not self._ttft and not self._ratio:
            return None
        if self._turns is None:
            return self._in_slot(arm, slot, ttft_s) if slot is not None else None
        if not self._is_drawn(unit):
            return None
        max_s = self._rules.max_ttft_s
        return self._unit(arm, float(max_s is not None and ttft_s > max_s), ttft_s)

    def readings(self) -> Iterator[Reading]:
        """Return the evidence at every guardrail."""
        for guardrail, against in (
            ("errors", self._errors),
            ("ttft", self._ttft),
            ("ttft_ratio", self._ratio),
        ):
            for arm, evidence in against.items():
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
        """Count a session's turn; return whether it is the one that counts."""
        assert self._turns is not None
        turn = self._turns.pop(unit, 0) + 1
        self._turns[unit] = turn
        if len(self._turns) > MAX_UNITS:
            self._turns.popitem(last=False)
        return turn == drawn_turn(unit)

    def _in_slot(self, arm: str, number: int, ttft_s: float) -> Verdict | None:
        """Take in one of a slot, and close those that are over.

        A slot waits one slot longer for answers under way; what comes still later, being slow,
        must not be lost: it goes to the arm's newest slot.
        """
        slot = self._slots.get(number)
        if slot is None and number > self._closed:
            slot = self._slots[number] = _Slot(arm)
        if slot is None:
            own = [each for each in self._slots.values() if each.arm == arm]
            if not own:
                return None
            slot = own[-1]
        slot.add(ttft_s, self._rules.max_ttft_s)
        for over in sorted(each for each in self._slots if each < number - 1):
            self._closed = max(self._closed, over)
            verdict = self._close(self._slots.pop(over))
            if verdict is not None:
                return verdict
        return None

    def _close(self, slot: _Slot) -> Verdict | None:
        return self._unit(slot.arm, slot.num_late / slot.num, slot.total_s / slot.num)

    def _unit(self, arm: str, late: float, value_s: float) -> Verdict | None:
        """Take in one unit: its share of late first tokens, and its time."""
        ttft = self._ttft.get(arm)
        if ttft is not None:
            ttft.add(late)
            verdict = self._verdict(arm, "ttft", ttft)
            if verdict is not None:
                return verdict
        if arm != self._control:
            return self._pair(arm, value_s, is_control=False)
        for treated in self._ratio:
            verdict = self._pair(treated, value_s, is_control=True)
            if verdict is not None:
                return verdict
        return None

    def _pair(self, arm: str, value_s: float, *, is_control: bool) -> Verdict | None:
        ratio, bound = self._ratio.get(arm), self._rules.max_ttft_ratio
        if ratio is None or bound is None:
            return None
        own, control = self._unpaired[arm]
        (control if is_control else own).append(value_s)
        if not own or not control:
            return None
        value_s, limit_s = own.popleft(), control.popleft() * bound
        ratio.add(0.5 if value_s == limit_s else float(value_s > limit_s))
        return self._verdict(arm, "ttft_ratio", ratio)

    def _verdict(self, arm: str, guardrail: str, evidence: Evidence) -> Verdict | None:
        if evidence.num < self._rules.min_samples or evidence.log_wealth < self._needed:
            return None
        return Verdict(arm=arm, guardrail=guardrail, reason=self._reason(guardrail, evidence))

    def _reason(self, guardrail: str, evidence: Evidence) -> str:
        share = f"{evidence.mean or 0.0:.1%} of {evidence.num}"
        rules = self._rules
        if guardrail == "errors":
            return f"{share} requests failed; max_error_rate is {rules.max_error_rate:g}"
        what = "slots" if self._turns is None else "sessions"
        if guardrail == "ttft":
            return (
                f"{share} {what}' first tokens came after {rules.max_ttft_s:g} s; at most "
                f"{1 - rules.ttft_quantile:.1%} may"
            )
        return (
            f"in {share} pairs of {what} the first token took more than "
            f"{rules.max_ttft_ratio:g} times the control variant's"
        )


class _Slot:
    """First tokens of one time slot."""

    __slots__ = ("arm", "num", "num_late", "total_s")

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self.num = self.num_late = 0
        self.total_s = 0.0

    def add(self, ttft_s: float, max_s: float | None) -> None:
        self.num += 1
        self.num_late += max_s is not None and ttft_s > max_s
        self.total_s += ttft_s


def drawn_turn(unit: str) -> int:
    """Draw which of a session's turns counts: k with probability 1 in 2 to the k."""
    bits = mix(int(unit, 16))
    turn = 1
    while turn < _LAST_TURN and bits & 1:
        bits >>= 1
        turn += 1
    return turn


def _against(rule: float | None, arms: list[str], bound: float | None) -> dict[str, Evidence]:
    return {} if rule is None or bound is None else {arm: Evidence(bound) for arm in arms}
