"""What may be said about differences: pairs, intervals, verdicts, trends.

What must live here: how measured turns are paired, drawn anew and judged; pure functions of
results and a seed. What must not: measuring, tables, pictures, words for people.
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
