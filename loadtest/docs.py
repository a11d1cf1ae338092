"""Fill the generated parts of the documentation from the code that they describe.

    python -m loadtest.docs                     rewrite README.md and docs/*.md where they are old
    python -m loadtest.docs --check             change nothing; status 1 if something is old
    python -m loadtest.docs --trace FILE        do the queue-model study too (minutes)

A part begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; NAME is a key of
`MAKERS`. Everything else in a document is written by hand. Modules above floor 3 are read as
text, never imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct
from prometheus_client import Counter, Histogram

from loadtest.emulator.cli import emulate
from loadtest.emulator.faults import Fault
from loadtest.emulator.time_model import PRESETS, TimeModel
from policies.registry import POLICIES
from router.config import Option, ReplicaConfig, options
from router.metrics import Metrics, RankState

ROOT = Path(__file__).resolve().parent.parent

_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Maker = Callable[[], str]


def documents() -> list[Path]:
    """List what may hold generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill(text: str, makers: Mapping[str, Maker]) -> str:
    """Make every generated part of a document anew; those without a maker stay.

    Raises:
        ValueError: A part has a name that nobody makes, not even on demand.
    """

    def part(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name in makers:
            return f"{begin}\n{makers[name]().strip()}\n\n{end}"
        if name in ON_DEMAND:
            return found[0]
        raise ValueError(f"nobody makes {name!r}; known: {', '.join([*makers, *ON_DEMAND])}")

    return _PART.sub(part, text)


# -------------------------------------------------------------------- configuration


def option_tables() -> str:
    """Describe every configuration key, a table for each section."""
    parts = [f"### `replicas`\n\n{_replica_table()}"]
    by_section = groupby(options(), key=lambda option: option.path[0])
    for section, members in by_section:
        if section == "replicas":
            continue
        rows = [
            (
                f"`{'.'.join(option.path)}`",
                f"`--{_flag(option)}`",
                f"`{option.variable}`",
                _default(option.default),
                option.description,
            )
            for option in members
        ]
        header = ("key", "flag", "variable", "default", "what it is")
        parts.append(f"### `{section}`\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _replica_table() -> str:
    """Describe the keys of one entry of `replicas`."""
    rows = []
    for field in msgspec.structs.fields(ReplicaConfig):
        required = field.default is msgspec.NODEFAULT
        default = "required" if required else _default(field.default)
        rows.append((f"`{field.name}`", default, description_of(ReplicaConfig, field.name)))
    return (
        "A list. An entry is a base URL, or a mapping of:\n\n"
        + table(("key", "default", "what it is"), rows)
        + "\n\nFlag: `--replica URL`, repeatable. Variable: `WARMROUTE_REPLICAS`, comma-separated."
    )


def _flag(option: Option) -> str:
    return f"{option.flag}` `--no-{option.flag}" if option.kind is bool else option.flag


def _default(value: Any) -> str:
    if value in (None, "") or (isinstance(value, (tuple, dict)) and not value):
        return "none"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1_000_000:
        return f"`{value:_}`"
    return f"`{value}`"


def description_of(struct: type[Struct], name: str) -> str:
    """Read the description in a field's annotation; empty if there is none."""
    schema = msgspec.json.schema(struct, schema_hook=lambda _: {})
    fields = schema["$defs"][struct.__name__]["properties"]
    return str(fields[name].get("description", ""))


# -------------------------------------------------------------------- policies


def policy_sections() -> str:
    """Describe every policy: its docstring, its parameters."""
    parts = []
    for name, policy in POLICIES.items():
        parts.append(f"### `{name}`\n\n{' '.join((policy.__doc__ or '').split())}")
        rows = [
            (
                f"`{field.name}`",
                f"`{field.default:g}`",
                _range(policy, field.name),
                description_of(policy, field.name),
            )
            for field in msgspec.structs.fields(policy)
        ]
        if rows:
            parts.append(table(("parameter", "default", "range", "what it is"), rows))
    return "\n\n".join(parts)


def _range(policy: type[Struct], name: str) -> str:
    schema = msgspec.json.schema(policy)["$defs"][policy.__name__]["properties"][name]
    low, high = schema.get("minimum"), schema.get("maximum")
    return f"{low:g} to {high:g}" if high is not None else f"{low:g} or more"


def queue_model(trace: Path) -> str:
    """Do the study on a Mooncake trace; minutes."""
    from loadtest.queue_study import study

    return study(trace)


# -------------------------------------------------------------------- metrics


class _OneReplica:
    """A source for the gauges that are read at scrape time: one replica of each sample."""

    def rank_states(self) -> Iterator[RankState]:
        yield RankState(
            replica="r1",
            state="exact",
            healthy=True,
            num_requests=0,
            num_queued_tokens=0,
            queue_ms=0.0,
            num_blocks={"gpu": 0},
            events={"batches": 0},
            cost_error_ms=0.0,
            trust=1.0,
        )


def metric_tables() -> str:
    """Describe every metric under the name that a scrape shows."""
    metrics = Metrics()
    pushed = [
        (instrument, instrument._labelnames)
        for instrument in vars(metrics).values()
        if isinstance(instrument, Counter | Histogram)
    ]
    metrics.watch(_OneReplica())
    names = {family.name for instrument, _ in pushed for family in instrument.describe()}
    rows = [
        _metric_row(family.name, family.type, labels, family.documentation)
        for instrument, labels in pushed
        for family in instrument.describe()
    ]
    pulled = [
        _metric_row(f.name, f.type, tuple(f.samples[0].labels), f.documentation)
        for f in metrics.registry.collect()
        if f.name not in names
    ]
    header = ("metric", "type", "labels", "what it is")
    return (
        f"### Requests\n\n{table(header, rows)}\n\n"
        f"### Replicas, read at scrape time\n\n{table(header, pulled)}"
    )


def _metric_row(name: str, kind: str, labels: Sequence[str], text: str) -> tuple[str, ...]:
    shown = f"{name}_total" if kind == "counter" else name
    return f"`{shown}`", kind, ", ".join(f"`{label}`" for label in labels) or "-", text


# -------------------------------------------------------------------- the emulator


def emulator_options() -> str:
    """Describe the flags of `warmroute emulate`."""
    rows = []
    for parameter in emulate.params:
        assert isinstance(parameter, click.Option)
        flags = " ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
        if isinstance(parameter.type, click.Choice):
            flags += " " + ", ".join(map(str, parameter.type.choices))
        default = parameter.default
        shown = _default(default) if isinstance(default, (str, int, float)) else "-"
        rows.append((flags, shown, parameter.help or ""))
    return table(("flag", "default", "what it is"), rows)


def fault_list() -> str:
    """Quote the fault switches."""
    return f"```text\n{_dedented(Fault.__doc__ or '')}\n```"


def presets() -> str:
    """List the time models."""
    names = TimeModel.__struct_fields__
    rows = [
        (f"`{preset}`", *(f"{getattr(model, name):g}" for name in names))
        for preset, model in PRESETS.items()
    ]
    return table(("preset", *(f"`{name}`" for name in names)), rows)


# -------------------------------------------------------------------- architecture


def docstring(path: str) -> Maker:
    """Quote a module's docstring, read from its source."""
    return lambda: f"```text\n{ast.get_docstring(ast.parse((ROOT / path).read_text()))}\n```"


def floors() -> str:
    """Draw the floors as import-linter knows them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    lines = [f"{len(layers) - 1 - i:2}  {layer}" for i, layer in enumerate(layers)]
    return "```text\n" + "\n".join(lines) + "\n```"


# -------------------------------------------------------------------- all together


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _dedented(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    lines = [line.removeprefix("    ") for line in rest.splitlines()]
    return "\n".join([first, *lines]).rstrip()


MAKERS: dict[str, Maker] = {
    "options": option_tables,
    "policies": policy_sections,
    "metrics": metric_tables,
    "emulator-options": emulator_options,
    "faults": fault_list,
    "presets": presets,
    "floors": floors,
    "request": docstring("router/pipeline.py"),
    "events": docstring("router/ingest.py"),
    "tasks": docstring("router/lifecycle.py"),
    "errors": docstring("router/errors.py"),
    "health": docstring("router/fleet/health.py"),
}

ON_DEMAND = frozenset({"queue-model"})


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite what is old; return 1 if there was something and --check forbade it."""
    args = argument_parser().parse_args(argv)
    makers = dict(MAKERS)
    if args.trace is not None:
        makers["queue-model"] = lambda: queue_model(args.trace)
    num_old = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        filled = fill(text, makers)
        if filled == text:
            continue
        num_old += 1
        print(f"{path.relative_to(ROOT)}: {'old' if args.check else 'rewritten'}")
        if not args.check:
            path.write_text(filled, encoding="utf-8")
    return 1 if num_old and args.check else 0


def argument_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.docs")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
