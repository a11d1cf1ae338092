"""What may be concluded from measurements: pairs, intervals, verdicts, trends.

    measures, pairing, comparison   turns of two variants that ran the same workload, turn by turn
    bootstrap                       intervals by drawing whole clusters anew, and by rounds
    resampling                      the same for variants that have sessions of their own
    effects, sequence, power        live experiments: intervals that hold at every look
    trend                           does a figure drift
    words                           estimates and comparisons as people read them

Pure functions of results and a seed. What must not live here: measuring, tables, pictures.
"""

from loadtest.statistics.bootstrap import Interval
from loadtest.statistics.comparison import Comparison, Verdict, compare
from loadtest.statistics.measures import MEASURES, Measure, is_good, within_slo
from loadtest.statistics.pairing import Round, num_differing_tokens, pair, roots
from loadtest.statistics.trend import Trend, across, within

__all__ = [
    "MEASURES",
    "Comparison",
    "Interval",
    "Measure",
    "Round",
    "Trend",
    "Verdict",
    "across",
    "compare",
    "is_good",
    "num_differing_tokens",
    "pair",
    "roots",
    "within",
    "within_slo",
]
