"""What a live experiment says, read from the decision records of all routers.

What must live here: reading records, and a verdict that may be asked for at any time. What must
not: formulas (loadtest.statistics), assigning variants, stopping them (that is the router's),
pictures.

The way of a report, top to bottom:

    records        read by DuckDB, bad lines named           bad_lines
    observations   which requests count, for which unit      metrics
    evidence       effects and their intervals at every look
    arms           figures of each variant, for the tables
    findings       what limits or breaks the claim           ratio_check, soundness, trials,
                                                             design_limits, surroundings
    verdict        the answer in words
    report         all of it as data                         tables, terminal, page, cli

Beside it: `shadows` and `redecide` for policies that did not route, `study` and `drawn` for the
proof that the promises are kept.
"""

from loadtest.experiments.bad_lines import RecordsError
from loadtest.experiments.evidence import Options
from loadtest.experiments.records import Records, load
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
