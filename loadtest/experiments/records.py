"""Decision records of any number of routers: which lines count, and the fields that are kept.

A record has a snapshot of every candidate, so of several gigabytes only the fields below are kept.
"""

from __future__ import annotations

import glob
import gzip
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from sys import intern
from typing import IO, Any, Final

import msgspec
from msgspec import Struct

from loadtest.words import moment
from policies.naming import label_of
from policies.refusals import meant
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
    router_ms: float = 0.0
    waited_ms: float = 0.0
    ttft_ms: float | None = None


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """One request, from its record.

    ttft_ms: From arrival, as its client sees it: with the time in the router and in its queue.
    """

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
    waited_ms: float
    ttft_ms: float | None
    total_ms: float

    @property
    def held(self) -> int:
        """Return the prompt tokens that the chosen replica had itself."""
        return max(self.num_gpu_tokens, self.num_cpu_tokens)


class Named(Struct, frozen=True, kw_only=True):
    """One definition of an experiment in the records; `trial` is its id."""

    name: str
    design: str
    trial: str
    num_requests: int
    arms: tuple[str, ...]  # the control first
    begin_s: float  # its first request, unix seconds
    end_s: float  # its last request

    def has(self, assignment: AssignmentRecord | None) -> bool:
        """Return whether a request belongs to it."""
        return assignment is not None and _key(assignment) == (self.name, self.design, self.trial)


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
        """List the definitions of an experiment, the newest first."""
        own = [each for each in self.experiments if each.name == name]
        return sorted(own, key=lambda each: (each.begin_s, each.trial), reverse=True)

    def choose(self, name: str | None, trial: str | None = None) -> Named:
        """Return the newest definition of the experiment called `name`, or `trial`.

        Args:
            name: None: there is only one name.
            trial: Id of a definition.

        Raises:
            RecordsError: there is none, it is unknown, or there are several.
        """
        names: Counter[str] = Counter()
        for each in self.experiments:
            names[each.name] += each.num_requests
        known = ", ".join(f"{name} ({count:,} requests)" for name, count in names.items())
        if not names:
            raise RecordsError(
                f"{self.num_records:,} records, and none is of an experiment (completions without "
                "a session id are in none)"
            )
        if name is None and len(names) > 1:
            raise RecordsError(f"several experiments: {known}; choose one with --experiment NAME")
        if name is not None and name not in names:
            raise RecordsError(f"no experiment {name!r}{meant(name, names)} (there are: {known})")
        trials = self.trials(name or next(iter(names)))
        if trial is None:
            return trials[0]
        found = next((each for each in trials if each.trial == trial), None)
        if found is None:
            listed = ", ".join(
                f"{each.trial} (from {moment(each.begin_s)}, {each.num_requests:,} requests)"
                for each in trials
            )
            raise RecordsError(
                f"experiment {trials[0].name!r} has no trial {trial!r} (there are: {listed})"
            )
        return found


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


def load(patterns: Sequence[str], *, skip_bad: bool = False) -> Records:
    """Read the records of all files.

    A last line that is cut off (its router still writes) is left out and counted. With `skip_bad`
    so are other lines that are no records.

    Args:
        patterns: Files, globs, directories.

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
        before_ms = line.router_ms + line.waited_ms
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
            waited_ms=line.waited_ms,
            ttft_ms=before_ms + line.ttft_ms if line.ttft_ms is not None else None,
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
    """List the definitions of experiments, by name and time."""
    found: dict[tuple[str, str, str], list[Request]] = {}
    for request in requests:
        if request.assignment is not None:
            found.setdefault(_key(request.assignment), []).append(request)
    named = []
    for (name, design, trial), own in found.items():
        arms = sorted({each.assignment.arm for each in own if each.assignment is not None})
        controls = {each.assignment.control for each in own if each.assignment is not None}
        named.append(
            Named(
                name=name,
                design=design,
                trial=trial,
                num_requests=len(own),
                arms=tuple(sorted(arms, key=lambda arm: arm not in controls)),
                begin_s=min(each.started_s for each in own),
                end_s=max(each.started_s for each in own),
            )
        )
    return tuple(sorted(named, key=lambda each: (each.name, each.begin_s, each.design)))


def _key(assignment: AssignmentRecord) -> tuple[str, str, str]:
    return assignment.experiment, assignment.design, assignment.trial or UNNAMED
