"""The group of all commands. Commands that need more than the router (emulate, demo, …) are entry
points of the group `warmroute.commands`, loaded when called: router does not import loadtest.
"""

from __future__ import annotations

import difflib
import os
from importlib.metadata import entry_points, version
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from router.cli.terminal import Formatter

COMMANDS = "warmroute.commands"
_INTERRUPTED: Final = 130  # as shells count: 128 and the number of SIGINT

# The first sentence of each command's help, so that `--help` imports none: that takes a second.
SUMMARIES: Final = {
    "compare": "Compare runs of one workload.",
    "demo": "See what cache-aware routing does, without a GPU.",
    "emulate": "Serve a vLLM-compatible replica without a model.",
    "estimate": "Estimate how much warmroute would save on your traffic.",
    "redecide": "Decide recorded requests again.",
    "replay": "Send a workload to an API and measure each turn.",
    "report": "Report which variant of a live experiment is better.",
    "simulate": "Simulate a workload under every policy.",
    "trace": "Describe and convert workloads.",
}

GROUPS: Final = {
    "Start": ("demo", "check", "serve"),
    "Configure": ("options", "policies", "schema", "tenant-key"),
    "Ask a running router": (
        "status",
        "tail",
        "why",
        "page",
        "replicas",
        "engine",
        "admin-token",
    ),
    "Evaluate": (
        "estimate",
        "compare",
        "replay",
        "simulate",
        "emulate",
        "trace",
        "report",
        "redecide",
    ),
}
"""How `--help` groups the commands; others come last."""

# transformers announces at import that there is no torch; here that is meant.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

click.Context.formatter_class = Formatter


class _LazyGroup(click.Group):
    """A group whose further commands are found by name and imported late."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if os.environ.get("NO_COLOR"):
            extra.setdefault("color", False)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(_INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            {*super().list_commands(ctx), *(e.name for e in entry_points(group=COMMANDS))}
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for entry in entry_points(group=COMMANDS, name=cmd_name):
            command: click.Command = entry.load()
            return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in groups, without importing those of `SUMMARIES`."""
        names = self.list_commands(ctx)
        grouped = {name for members in GROUPS.values() for name in members}
        rest = tuple(name for name in names if name not in grouped)
        width = max(map(len, names))
        limit = formatter.width - width - 4
        for heading, members in (*GROUPS.items(), ("More", rest)):
            rows = [
                (f"{name:{width}}", self._summary(ctx, name, limit))
                for name in members
                if name in names
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name, without importing those of `SUMMARIES`."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=self._summary(ctx, name, 80)) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def _summary(self, ctx: click.Context, name: str, limit: int) -> str:
        if name in SUMMARIES:
            return click.Command(name, help=SUMMARIES[name]).get_short_help_str(limit)
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            _, command, rest = super().resolve_command(ctx, args)
            return (command.name if command is not None else None), command, rest
        except click.UsageError as exc:
            raise click.UsageError(self._unknown(ctx, args[0]), ctx) from exc

    def _unknown(self, ctx: click.Context, name: str) -> str:
        """Refuse: there is no such command, and which one was meant."""
        known = self.list_commands(ctx)
        near = difflib.get_close_matches(name, known, n=1)
        if not near:
            return f"No such command {name!r}. Commands: {', '.join(known)}."
        return f"No such command {name!r}. Did you mean {near[0]!r}? All: {ctx.command_path} --help"


@click.group("warmroute", cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("warmroute"), message="warmroute %(version)s")
def main() -> None:
    """Cache-aware routing in front of vLLM replicas.

    \b
    Try it without a GPU:     warmroute demo
    Route to two engines:     warmroute serve --replica URL --replica URL
    Check the setup:          warmroute check, with the options of serve
    """
