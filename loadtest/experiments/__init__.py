"""Reports on live experiments, from the decision records of all routers.

Formulas are in `loadtest.statistics`. The router assigns variants. The steps of a report:

    records        which lines count, bad lines named
    observations   which requests count, for which unit; the metrics
    findings       what limits or breaks the claim
    comparison     effects, their intervals at every look, the verdict in words
    report         all of it as data, and on a terminal

`redecide` is for policies that did not route.
"""

from loadtest.experiments.comparison import Options
from loadtest.experiments.records import Records, RecordsError, load
from loadtest.experiments.redecide import Redecided, redecide
from loadtest.experiments.report import Report, make_report

__all__ = [
    "Options",
    "Records",
    "RecordsError",
    "Redecided",
    "Report",
    "load",
    "make_report",
    "redecide",
]
