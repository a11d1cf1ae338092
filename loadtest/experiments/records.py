"""Decision records of any number of routers, read by DuckDB into one table.

This module decides which lines count and which columns are read. A record has a snapshot of every
candidate, so of several gigabytes only the columns below are kept.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.experiments.bad_lines import BadLine, RecordsError, find
from loadtest.extras import need
from loadtest.words import moment
from router.records.record import SCHEMA

UNNAMED: Final = "none"
"""The trial of older records, which name none."""

_NAMED: Final = 5  # bad lines named for each file; the rest is counted

# Of router/records/record.py; a field that a record lacks is NULL.
_COLUMNS: Final = {
    "schema": "INTEGER",
    "request_id": "VARCHAR",
    "at": "DOUBLE",
    "model": "VARCHAR",
    "policy": "VARCHAR",
    "policy_params": "JSON",
    "assignment": "STRUCT(experiment VARCHAR, design VARCHAR, arm VARCHAR, unit VARCHAR, "
    "share DOUBLE, slot BIGINT, is_wash_out BOOLEAN, not_counted VARCHAR, stop_reason VARCHAR, "
    "control VARCHAR, trial VARCHAR)",
    "state": "VARCHAR",
    "snapshot": "STRUCT(number UBIGINT, seed UBIGINT, replicas STRUCT(id VARCHAR, "
    'num_gpu_tokens BIGINT, num_cpu_tokens BIGINT, "cost" STRUCT(ms_per_token DOUBLE))[])',
    "decision": "STRUCT(candidate VARCHAR)",
    "shadows": "STRUCT(policy VARCHAR, candidate VARCHAR, agrees BOOLEAN, ttft_ms DOUBLE, "
    "num_uncached_tokens BIGINT, num_fetched_tokens BIGINT, regret_ms DOUBLE)[]",
    "tries": "STRUCT(candidate VARCHAR)[]",
    "outcome": "VARCHAR",
    "status": "INTEGER",
    "num_prompt_tokens": "BIGINT",
    "num_predicted_cached_tokens": "BIGINT",
    "num_reported_cached_tokens": "BIGINT",
    "num_completion_tokens": "BIGINT",
    "router_ms": "DOUBLE",
    "predicted_ttft_ms": "DOUBLE",
    "ttft_ms": "DOUBLE",
    "total_ms": "DOUBLE",
}

_IS_GOOD: Final = (
    f'coalesce(schema BETWEEN 1 AND {SCHEMA} AND request_id IS NOT NULL AND "at" IS NOT NULL '
    "AND outcome IS NOT NULL AND total_ms IS NOT NULL, false)"
)

_TABLE: Final = """
CREATE TABLE lines AS
SELECT filename AS file, {good} AS is_good, request_id, "at" AS at_s, model, policy,
  coalesce(policy_params, '{{}}') AS params, state, outcome, status,
  assignment.experiment AS experiment, assignment.design AS design, assignment.arm AS arm,
  assignment.unit AS unit, assignment.share AS share, assignment.slot AS slot,
  coalesce(assignment.is_wash_out, false) OR assignment.not_counted IS NOT NULL AS is_wash_out,
  coalesce(assignment.not_counted,
    CASE WHEN assignment.is_wash_out THEN 'wash_out' END) AS not_counted,
  assignment.stop_reason AS stop_reason, nullif(assignment.control, '') AS control,
  CASE WHEN assignment IS NOT NULL THEN coalesce(nullif(assignment.trial, ''), '{unnamed}') END
    AS trial,
  snapshot.number AS number, snapshot.seed AS seed,
  array_to_string(list_sort([r.id FOR r IN snapshot.replicas]), ' ') AS fleet,
  decision.candidate AS candidate,
  ([r FOR r IN snapshot.replicas IF r.id = decision.candidate])[1] AS chosen,
  shadows, greatest(len(tries), 1) AS num_tries,
  num_prompt_tokens AS prompt, num_predicted_cached_tokens AS predicted,
  num_reported_cached_tokens AS reported, num_completion_tokens AS completion,
  router_ms, predicted_ttft_ms, ttft_ms, total_ms
FROM read_json(?, format='newline_delimited', filename=true, ignore_errors=true,
  maximum_object_size=67108864, columns={columns})
"""


class Named(Struct, frozen=True, kw_only=True):
    """One start of an experiment in the records, or several starts that are joined.

    `trials` are the ids of its starts.
    """

    name: str
    design: str
    num_requests: int
    arms: tuple[str, ...]
    trials: tuple[str, ...]
    control: str | None  # the control of its definition; None: not recorded
    begin_s: float  # its first request, unix seconds
    end_s: float  # its last request


class Records(Struct, frozen=True, kw_only=True):
    """The records. `connection` has one table, `records`, with a row for each record."""

    connection: Any
    files: tuple[str, ...]
    num_records: int
    num_bad: int
    num_twice: int  # the same request at the same time, in two files
    bad_lines: tuple[BadLine, ...]  # the first of each file
    experiments: tuple[Named, ...]

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Query the table."""
        return list(self.connection.execute(query, list(parameters)).fetchall())

    def columns(self, query: str, parameters: Sequence[Any] = ()) -> dict[str, Any]:
        """Query the table; return a masked array for each column."""
        return dict(self.connection.execute(query, list(parameters)).fetchnumpy())

    def trials(self, name: str) -> list[Named]:
        """List the starts of an experiment, the newest first."""
        own = [each for each in self.experiments if each.name == name]
        return sorted(own, key=lambda each: (each.begin_s, each.trials), reverse=True)

    def choose(self, name: str | None, trials: Sequence[str] = ()) -> Named | None:
        """Return the experiment called `name`, or the only one; None: there is none.

        Args:
            name: None: there is only one name.
            trials: Ids of its starts, which are joined; none: the newest.

        Raises:
            RecordsError: it is unknown, there are several, or it has several designs.
        """
        names = {e.name: 0 for e in self.experiments}
        for each in self.experiments:
            names[each.name] += each.num_requests
        known = ", ".join(f"{name} ({count:,} requests)" for name, count in names.items())
        if name is None and not names:
            return None
        if name is None and len(names) > 1:
            raise RecordsError(f"several experiments: {known}; choose one with --experiment NAME")
        if name is not None and name not in names:
            near = get_close_matches(name, names, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise RecordsError(f"no experiment {name!r}{meant} (there are: {known or 'none'})")
        return _joined(_of_trials(self.trials(name or next(iter(names))), trials))


def _of_trials(known: list[Named], wanted: Sequence[str]) -> list[Named]:
    """Return the starts that are wanted, or the newest.

    Raises:
        RecordsError: a start is unknown.
    """
    ids = {trial for each in known for trial in each.trials}
    for trial in wanted:
        if trial not in ids:
            trials = ", ".join(
                f"{t} (from {moment(e.begin_s)}, {e.num_requests:,} requests)"
                for e in known
                for t in e.trials
            )
            raise RecordsError(
                f"experiment {known[0].name!r} has no trial {trial!r} (there are: {trials})"
            )
    kept = set(wanted) or set(known[0].trials)
    return [each for each in known if kept.issuperset(each.trials)]


def _joined(parts: list[Named]) -> Named:
    """Join starts, the newest first.

    Raises:
        RecordsError: they have several designs.
    """
    newest = parts[0]
    if len({each.design for each in parts}) > 1:
        designs = " and ".join(sorted({each.design for each in parts}))
        raise RecordsError(
            f"experiment {newest.name!r} has records of two designs, {designs}; keep those "
            "of one with --trial, or --since and --until"
        )
    return replace(
        newest,
        num_requests=sum(each.num_requests for each in parts),
        arms=tuple(sorted({arm for each in parts for arm in each.arms})),
        trials=tuple(dict.fromkeys(trial for each in parts for trial in each.trials)),
        begin_s=min(each.begin_s for each in parts),
        end_s=max(each.end_s for each in parts),
    )


def resolve(patterns: Sequence[str]) -> list[Path]:
    """Return the files of names, globs and directories (*.jsonl and *.jsonl.gz), each once.

    Raises:
        RecordsError: a pattern matches nothing.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
        if not matches:
            raise RecordsError(f"{pattern}: no such file, and no file matches")
        for match in matches:
            found.setdefault(match.resolve(), match)
    return list(found.values())


def load(
    patterns: Sequence[str],
    *,
    skip_bad: bool = False,
    since_s: float | None = None,
    until_s: float | None = None,
) -> Records:
    """Read the records of all files.

    A last line that is cut off (its router still writes) is left out and counted. With `skip_bad`
    so are other lines that are no records.

    Args:
        patterns: Files, globs, directories.
        since_s: Only records from then on, unix seconds.
        until_s: Only records before then.

    Raises:
        RecordsError: no files, none of their lines is a record, or some are not.
        MissingExtra: DuckDB is not installed.
    """
    duckdb = need("duckdb")
    files = resolve(patterns)
    connection = duckdb.connect()
    columns = "{" + ", ".join(f"'{name}': '{kind}'" for name, kind in _COLUMNS.items()) + "}"
    query = _TABLE.format(good=_IS_GOOD, columns=columns, unnamed=UNNAMED)
    try:
        connection.execute(query, [[str(file) for file in files]])
    except duckdb.Error as exc:
        raise RecordsError(f"cannot read the records: {exc}") from exc
    bad = _bad_lines(connection, skip_bad)
    connection.execute(
        "CREATE TABLE records AS SELECT DISTINCT ON (request_id, at_s) * FROM lines "
        "WHERE is_good AND at_s >= ? AND at_s < ? ORDER BY at_s",
        [-1e300 if since_s is None else since_s, 1e300 if until_s is None else until_s],
    )
    (num_lines,) = connection.execute(
        "SELECT count(*) FROM lines WHERE is_good AND at_s >= ? AND at_s < ?",
        [-1e300 if since_s is None else since_s, 1e300 if until_s is None else until_s],
    ).fetchone()
    (num_bad,) = connection.execute("SELECT count(*) FROM lines WHERE NOT is_good").fetchone()
    (num_records,) = connection.execute("SELECT count(*) FROM records").fetchone()
    connection.execute("DROP TABLE lines")
    if not num_records:
        raise RecordsError(f"no decision record in {', '.join(map(str, files))}")
    return Records(
        connection=connection,
        files=tuple(map(str, files)),
        num_records=num_records,
        num_bad=num_bad,
        num_twice=num_lines - num_records,
        bad_lines=tuple(bad),
        experiments=tuple(_experiments(connection)),
    )


def _bad_lines(connection: Any, skip_bad: bool) -> list[BadLine]:
    """Return the first bad lines of each file.

    Raises:
        RecordsError: some are not torn, and `skip_bad` is not set.
    """
    files = connection.execute(
        "SELECT file, count(*) FROM lines WHERE NOT is_good GROUP BY file ORDER BY file"
    ).fetchall()
    named: list[BadLine] = []
    for file, _ in files:
        named += find(Path(file), _NAMED)
    foreign = [line for line in named if not line.is_torn]
    if foreign and not skip_bad:
        num_bad = sum(count for _, count in files) - (len(named) - len(foreign))
        more = f" ({num_bad:,} such lines in all)" if num_bad > 1 else ""
        raise RecordsError(f"{foreign[0]}{more}; leave such lines out with --skip-bad")
    return named


def _experiments(connection: Any) -> list[Named]:
    rows = connection.execute(
        "SELECT experiment, design, trial, count(*), list_sort(list(DISTINCT arm)), "
        "arg_max(control, at_s), min(at_s - total_ms / 1000) AS begin_s, "
        "max(at_s - total_ms / 1000) FROM records WHERE experiment IS NOT NULL "
        "GROUP BY experiment, design, trial ORDER BY experiment, begin_s, design"
    ).fetchall()
    return [
        Named(
            name=name,
            design=design,
            num_requests=count,
            arms=tuple(arms),
            trials=(trial,),
            control=control,
            begin_s=begin_s,
            end_s=end_s,
        )
        for name, design, trial, count, arms, control, begin_s, end_s in rows
    ]
