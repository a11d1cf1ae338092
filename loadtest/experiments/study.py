"""Are the promises kept? Thousands of drawn experiments, looked at after every batch.

    python -m loadtest.experiments.study                a table of docs/research; minutes
    python -m loadtest.experiments.study --quick        a coarse one, in seconds

Two promises: an A/A experiment comes out decided in at most alpha of all cases, however often one
looks; and an effect is found with at least the power that was predicted for it. For contrast, the
same data judged by tests that were made for one look: by request (which takes the turns of a
session for independent), and by session or slot (which does not, but may be looked at once).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.random import Generator

from loadtest.experiments.drawn import Look, Sessions, Slots
from loadtest.experiments.evidence import Options
from loadtest.experiments.observations import Ints
from loadtest.markdown import table
from loadtest.statistics.effects import estimate
from loadtest.statistics.power import needs
from loadtest.statistics.sequence import Floats, radius

_ONE_LOOK: Final = 1.96
_UNITS_AT_ONCE: Final = 200_000  # in memory: about 100 MB for each million requests


class Case(Struct, frozen=True, kw_only=True):
    """One kind of experiment."""

    label: str
    design: Sessions | Slots
    num_looks: int
    num_repetitions: int
    seed: int = 7

    @property
    def num_units(self) -> int:
        """Count the sessions or slots."""
        design = self.design
        return design.num_slots if isinstance(design, Slots) else design.num_sessions

    def sized(self, num_units: int) -> Case:
        """Take so many sessions or slots instead (pairs stay whole), looked at as often."""
        if isinstance(self.design, Slots):
            return replace(self, design=replace(self.design, num_slots=num_units + num_units % 2))
        return replace(self, design=replace(self.design, num_sessions=num_units))

    @property
    def block(self) -> Ints | None:
        """Pairs of slots, where they were drawn so."""
        if isinstance(self.design, Slots) and self.design.is_balanced:
            return np.arange(self.design.num_slots) // 2
        return None


class Rates(Struct, frozen=True):
    """How many of the repetitions came out decided, by method, as shares."""

    sequence: float  # ever, of all looks
    equal: float  # the last look: no difference larger than the margin
    once: float  # a test by unit, at the last look only
    peeking: float  # the same, at every look
    naive: float  # a test by request, at every look
    covered: float  # the sequence held the truth at every look


CASES: Final = (
    Case(
        label="split, 1,000 sessions, 40 looks",
        design=Sessions(),
        num_looks=40,
        num_repetitions=4000,
    ),
    Case(
        label="split, 1,000 sessions, a tenth treated",
        design=Sessions(share=0.1),
        num_looks=40,
        num_repetitions=2000,
    ),
    Case(
        label="split, 200 sessions",
        design=Sessions(num_sessions=200),
        num_looks=40,
        num_repetitions=4000,
    ),
    Case(
        label="split, 5,000 sessions",
        design=Sessions(num_sessions=5000),
        num_looks=40,
        num_repetitions=1000,
    ),
    Case(
        label="switchback, 40 slots, a look after each",
        design=Slots(num_slots=40),
        num_looks=40,
        num_repetitions=4000,
    ),
    Case(
        label="switchback, 200 slots",
        design=Slots(num_slots=200),
        num_looks=100,
        num_repetitions=2000,
    ),
    Case(
        label="switchback in balanced pairs, 80 slots",
        design=Slots(num_slots=80, is_balanced=True),
        num_looks=40,
        num_repetitions=4000,
    ),
)

EFFECTS: Final = (
    (CASES[0], 0.25, 2000),
    (CASES[0], 0.1, 400),
    (CASES[5], 0.2, 2000),
    (CASES[5], 0.1, 1000),
    (CASES[6], 0.2, 2000),
)
"""A pilot, how much faster the treated are, and how often the experiment that the pilot asks for
is repeated."""


def rates(case: Case, effect: float, options: Options | None = None) -> Rates:
    """Repeat a case; `effect` is how much faster the treated are, as a share (0: an A/A)."""
    options = options or Options()
    rng = np.random.default_rng(case.seed)
    at_once = max(1, _UNITS_AT_ONCE // case.num_units)
    left = case.num_repetitions
    sums = np.zeros(len(Rates.__struct_fields__))
    while left:
        num = min(at_once, left)
        sums += _counts(case, float(np.log1p(-effect)), num, rng, options)
        left -= num
    return Rates(*(sums / case.num_repetitions).tolist())


def needed_units(case: Case, effect: float, options: Options | None = None) -> int:
    """Ask a typical A/A pilot, as a report is asked, how many units finding an effect takes."""
    options = options or Options()
    rng = np.random.default_rng(case.seed + 1)
    *_, last = case.design.looks(0.0, 1, 101, rng)
    found = estimate(last.sums, last.counts, last.is_treated, block=case.block)
    typical = int(np.argsort(found.se)[len(found.se) // 2])
    needed = needs(
        se=float(found.se[typical]),
        df=float(found.df[typical]),
        num_units=case.num_units,
        span_s=1.0,
        alpha=options.alpha,
        power=options.power,
        scale=options.scale,
        effect=float(-np.log1p(-effect)),
        margin=options.margin,
    ).to_find
    assert needed is not None
    return needed.num_units


def _counts(case: Case, truth: float, num: int, rng: Generator, options: Options) -> Floats:
    """Repeat a case so many times; how often each of the fields of `Rates` came."""
    ever, peeked, naive, missed = (np.zeros(num, bool) for _ in range(4))
    for look in case.design.looks(truth, case.num_looks, num, rng):
        found = estimate(look.sums, look.counts, look.is_treated, block=case.block)
        reach = radius(found.se, scale=options.scale, alpha=options.alpha, df=found.df)
        ever |= np.abs(found.value) > reach
        missed |= np.abs(found.value - truth) > reach
        peeked |= np.abs(found.value) > _ONE_LOOK * found.se
        naive |= np.abs(_by_request(look)) > _ONE_LOOK
    once = np.abs(found.value) > _ONE_LOOK * found.se
    equal = np.abs(found.value) + reach <= np.log1p(options.margin)
    return np.array([a.sum() for a in (ever, equal, once, peeked, naive, ~missed)], dtype=float)


def _by_request(look: Look) -> Floats:
    """Compute the z statistic of a test that takes all requests for independent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        num, total, squares = np.moveaxis(look.naive, -1, 0)
        mean = total / num
        variance = (squares / num - mean**2) / num
        return np.asarray(np.nan_to_num((mean[:, 1] - mean[:, 0]) / np.sqrt(variance.sum(1))))


# -------------------------------------------------------------------- the table


def study(*, quick: bool = False, progress: Callable[[str], None] = lambda what: None) -> str:
    """Run all cases and lay them out as Markdown."""
    options = Options()
    none, some = [], []
    for case in CASES:
        progress(f"A/A: {case.label}")
        none.append(_row_without(_scaled(case, quick), options))
    for case, effect, num_repetitions in EFFECTS:
        progress(f"effect of {effect:.0%}: {case.label}")
        repeated = replace(case, num_repetitions=num_repetitions)
        some.append(_row_with(_scaled(repeated, quick), effect, options))
    return "\n\n".join(
        [
            f"A/A experiments, alpha = {options.alpha:g}: share that came out with a difference. "
            "Sessions are of heavy-tailed length and overlap, slots are autocorrelated.",
            table(
                (
                    "experiment",
                    "repeated",
                    "**the verdict, at every look**",
                    "interval by session or slot, last look only",
                    "the same, at every look",
                    "t-test by request, at every look",
                ),
                none,
            ),
            f"A true effect: how many units a pilot asked for to find it with {options.power:.0%} "
            "power, and the share of experiments of that size that found it. The last column: "
            "share whose band held the truth at every look.",
            table(
                (
                    "pilot",
                    "faster by",
                    "units asked for",
                    "repeated",
                    "**found**",
                    "band held the truth",
                ),
                some,
            ),
        ]
    )


def _scaled(case: Case, quick: bool) -> Case:
    return replace(case, num_repetitions=case.num_repetitions // 20) if quick else case


def _row_without(case: Case, options: Options) -> tuple[str, ...]:
    found = rates(case, 0.0, options)
    return (
        case.label,
        f"{case.num_repetitions:,}",
        f"**{found.sequence:.1%}**",
        f"{found.once:.1%}",
        f"{found.peeking:.0%}",
        f"{found.naive:.0%}",
    )


def _row_with(case: Case, effect: float, options: Options) -> tuple[str, ...]:
    num_units = needed_units(case, effect, options)
    found = rates(case.sized(num_units), effect, options)
    return (
        case.label,
        f"{effect:.0%}",
        f"{num_units:,}",
        f"{case.num_repetitions:,}",
        f"**{found.sequence:.0%}**",
        f"{found.covered:.1%}",
    )


def argument_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.experiments.study")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the repetitions")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    import sys

    args = argument_parser().parse_args(argv)
    print(study(quick=args.quick, progress=lambda what: print(what, file=sys.stderr, flush=True)))


if __name__ == "__main__":
    main()
