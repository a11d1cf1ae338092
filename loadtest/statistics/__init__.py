"""Statistics of measurements: pairs, intervals, verdicts.

    measures, pairing, comparison   turns of two variants that ran the same workload
    bootstrap                       intervals by drawing clusters again, and by rounds
    effects, sequence, power        live experiments: intervals for one look and for every look
    words                           estimates and comparisons in words

Pure functions of results and a seed: no measuring, no tables, no pictures.
"""

from loadtest.statistics.bootstrap import Interval
from loadtest.statistics.comparison import Comparison, Verdict, compare
from loadtest.statistics.measures import MEASURES, Measure, is_good, within_slo
from loadtest.statistics.pairing import Round, num_differing_tokens, pair

__all__ = [
    "MEASURES",
    "Comparison",
    "Interval",
    "Measure",
    "Round",
    "Verdict",
    "compare",
    "is_good",
    "num_differing_tokens",
    "pair",
    "within_slo",
]
