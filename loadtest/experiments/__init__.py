"""Reports on live experiments, from the decision records of all routers.

Formulas are in `loadtest.statistics`, pictures in `loadtest.pictures`. The router assigns and stops
variants. The steps of a report:

    records        which lines count, bad lines named
    observations   which requests count, for which unit      metrics
    evidence       effects and their intervals at every look
    `arms`         figures of each variant, for the tables
    findings       what limits or breaks the claim           ratio_check, soundness,
                                                             design_limits, surroundings
    verdict        the answer in words
    report         all of it as data                         tables, terminal, page, cli

`redecide` is for policies that did not route.
"""

from loadtest.experiments.evidence import Options
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
