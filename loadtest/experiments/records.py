"""Decision records of any number of routers: which lines count, and the fields that are kept.

A record has a snapshot of every candidate, so of several gigabytes only the fields below are kept.
"""

from __future__ import annotations

import glob
import gzip
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from sys import intern
from typing import IO, Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from loadtest.words import moment
from policies.naming import label_of
from policies.registry import create
from router.records.record import SCHEMA, AssignmentRecord

UNNAMED: Final = "none"
"""The trial of older records, which name none."""

_NAMED: Final = 5  # bad lines named for each file; the rest is counted
_SHOWN: Final = 60  # characters of a decoder's message
_NOT_A_RECORD: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class RecordsError(Exception):
    """The records cannot be read as asked; the message names file, line and field."""


class BadLine(Struct, frozen=True, kw_only=True):
    """A line that is left out; `is_torn`: the last line, cut off while it was written."""

    file: str
    line: int
    reason: str
    is_torn: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class _View(Struct):
    id: str
    num_gpu_tokens: int | None = None
    num_cpu_tokens: int | None = None


class _Snapshot(Struct):
    number: int
    seed: int
    replicas: list[_View]


class _Decision(Struct):
    candidate: str


class _Line(Struct):
    """The fields of a record that are read (router/records/record.py)."""

    schema: int
    request_id: str
    at: float
    outcome: str
    total_ms: float
    model: str = ""
    policy: str = ""
    policy_params: dict[str, Any] = {}
    assignment: AssignmentRecord | None = None
    state: str = "unknown"
    snapshot: _Snapshot | None = None
    decision: _Decision | None = None
    tries: list[Any] = []
    num_prompt_tokens: int | None = None
    num_predicted_cached_tokens: int | None = None
    num_reported_cached_tokens: int | None = None
    num_completion_tokens: int | None = None
    router_ms: float | None = None
    predicted_ttft_ms: float | None = None
    ttft_ms: float | None = None


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """One request, from its record."""

    file: str
    at_s: float  # unix seconds, end of the request
    started_s: float
    model: str
    policy: str  # label, with parameters
    assignment: AssignmentRecord | None
    state: str
    outcome: str
    number: int | None  # of the decision, among those of the router process `seed`
    seed: int | None
    num_tries: int
    fleet: str  # ids of all candidates
    candidate: str
    num_gpu_tokens: int  # cached at the chosen replica
    num_cpu_tokens: int
    prompt: int | None
    predicted: int | None
    reported: int | None
    completion: int | None
    router_ms: float | None
    predicted_ttft_ms: float | None
    ttft_ms: float | None
    total_ms: float

    @property
    def trial(self) -> str:
        """Return the id of the start that the request belongs to."""
        return (self.assignment.trial if self.assignment is not None else "") or UNNAMED

    @property
    def not_counted(self) -> str | None:
        """Return why the request does not count; None: it does."""
        return self.assignment.not_counted if self.assignment is not None else None

    @property
    def held(self) -> int:
        """Return the prompt tokens that the chosen replica had itself."""
        return max(self.num_gpu_tokens, self.num_cpu_tokens)


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
    """The records, in order of their ends."""

    requests: tuple[Request, ...]
    files: tuple[str, ...]
    num_bad: int
    num_twice: int  # the same request at the same time, in two files
    bad_lines: tuple[BadLine, ...]  # the first of each file
    experiments: tuple[Named, ...]

    @property
    def num_records(self) -> int:
        """Return the number of records."""
        return len(self.requests)

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
    """
    files = resolve(patterns)
    reader = _Reader()
    found: dict[tuple[str, float], Request] = {}
    bad: list[BadLine] = []
    num_bad = num_twice = 0
    for file in files:
        num_named = 0
        for number, line in lines_of(file):
            read = reader.read(str(file), number, line)
            if isinstance(read, BadLine):
                if not (skip_bad or read.is_torn):
                    raise RecordsError(f"{read}; leave such lines out with --skip-bad")
                num_bad += 1
                num_named += 1
                if num_named <= _NAMED:
                    bad.append(read)
            elif read is not None:
                key, request = read
                if since_s is not None and request.at_s < since_s:
                    continue
                if until_s is not None and request.at_s >= until_s:
                    continue
                num_twice += key in found
                found.setdefault(key, request)
    if not found:
        raise RecordsError(f"no decision record in {', '.join(map(str, files))}")
    requests = tuple(sorted(found.values(), key=lambda request: request.at_s))
    return Records(
        requests=requests,
        files=tuple(map(str, files)),
        num_bad=num_bad,
        num_twice=num_twice,
        bad_lines=tuple(bad),
        experiments=_experiments(requests),
    )


def lines_of(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, plain or .gz, with their numbers.

    Raises:
        RecordsError: the file cannot be read.
    """
    number = 0
    try:
        with file.open("rb") as raw:
            lines: IO[bytes] = gzip.open(raw) if file.suffix == ".gz" else raw  # type: ignore[assignment]
            for number, line in enumerate(lines, 1):
                yield number, line
    except (OSError, EOFError) as exc:
        raise RecordsError(f"{file}:{number}: {exc}") from exc


class _Reader:
    """Decodes lines; equal texts are kept once."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Line).decode
        self._labels: dict[tuple[str, bytes], str] = {}

    def read(
        self, file: str, number: int, line: bytes
    ) -> tuple[tuple[str, float], Request] | BadLine | None:
        """Decode a line, with its request's id and time; None: it is empty."""
        if not line.strip():
            return None
        try:
            read = self._decode(line)
        except _NOT_A_RECORD as exc:
            return _bad_line(file, number, line, exc)
        if not 1 <= read.schema <= SCHEMA:
            return BadLine(file=file, line=number, reason=_unknown(read.schema))
        return (read.request_id, read.at), self._request(file, read)

    def _request(self, file: str, line: _Line) -> Request:
        snapshot = line.snapshot
        candidate = line.decision.candidate if line.decision is not None else ""
        views = snapshot.replicas if snapshot is not None else []
        chosen = next((view for view in views if view.id == candidate), None)
        return Request(
            file=file,
            at_s=line.at,
            started_s=line.at - line.total_ms / 1000,
            model=intern(line.model),
            policy=self._label(line.policy, line.policy_params),
            assignment=line.assignment,
            state=intern(line.state),
            outcome=intern(line.outcome),
            number=snapshot.number if snapshot is not None else None,
            seed=snapshot.seed if snapshot is not None else None,
            num_tries=max(1, len(line.tries)),
            fleet=intern(" ".join(sorted(view.id for view in views))),
            candidate=intern(candidate),
            num_gpu_tokens=(chosen.num_gpu_tokens if chosen is not None else None) or 0,
            num_cpu_tokens=(chosen.num_cpu_tokens if chosen is not None else None) or 0,
            prompt=line.num_prompt_tokens,
            predicted=line.num_predicted_cached_tokens,
            reported=line.num_reported_cached_tokens,
            completion=line.num_completion_tokens,
            router_ms=line.router_ms,
            predicted_ttft_ms=line.predicted_ttft_ms,
            ttft_ms=line.ttft_ms,
            total_ms=line.total_ms,
        )

    def _label(self, name: str, params: dict[str, Any]) -> str:
        key = name, msgspec.json.encode(params, order="sorted")
        label = self._labels.get(key)
        if label is None:
            try:
                label = label_of(create(name, params))
            except (ValueError, TypeError):  # a policy of another version
                label = f"{name} {key[1].decode()}" if params else name
            self._labels[key] = label
        return label


class _Version(Struct):
    schema: int = SCHEMA


def _bad_line(file: str, number: int, line: bytes, error: Exception) -> BadLine:
    """Return what is wrong with a line: no JSON, another version, or another kind of record."""
    is_torn = False
    try:
        schema = msgspec.json.decode(line, type=_Version).schema
        reason = f"not a decision record: {error}" if 1 <= schema <= SCHEMA else _unknown(schema)
    except msgspec.ValidationError as exc:
        reason = f"not a decision record: {exc}"
    except _NOT_A_RECORD as exc:
        is_torn = not line.endswith(b"\n")
        reason = "the line is cut off" if is_torn else f"not JSON: {str(exc)[:_SHOWN]}"
    return BadLine(file=file, line=number, reason=reason, is_torn=is_torn)


def _unknown(schema: int) -> str:
    return f"field `schema`: version {schema} is unknown (this warmroute reads 1 to {SCHEMA})"


def _experiments(requests: Sequence[Request]) -> tuple[Named, ...]:
    """List the starts of experiments, by name and time."""
    found: dict[tuple[str, str, str], list[Request]] = {}
    for request in requests:
        assigned = request.assignment
        if assigned is not None:
            key = assigned.experiment, assigned.design, request.trial
            found.setdefault(key, []).append(request)
    named = [
        Named(
            name=name,
            design=design,
            num_requests=len(own),
            arms=tuple(sorted({each.assignment.arm for each in own if each.assignment})),
            trials=(trial,),
            control=next(
                (
                    each.assignment.control
                    for each in reversed(own)
                    if each.assignment and each.assignment.control
                ),
                None,
            ),
            begin_s=min(each.started_s for each in own),
            end_s=max(each.started_s for each in own),
        )
        for (name, design, trial), own in found.items()
    ]
    return tuple(sorted(named, key=lambda each: (each.name, each.begin_s, each.design)))
