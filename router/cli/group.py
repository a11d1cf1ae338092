"""The group of all commands. Commands that need more than the router (emulate, demo, …) are entry
points of the group `warmroute.commands`, loaded when called: router does not import loadtest.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points, version
from typing import Final

import click

COMMANDS = "warmroute.commands"

# The first sentence of each command's help, so that `--help` imports none: that takes a second.
SUMMARIES: Final = {
    "compare": "Find out which policy or router is better for a workload, "
    "and whether to believe it.",
    "demo": "See what cache-aware routing does, without a GPU.",
    "emulate": "Serve one vLLM-compatible replica without a model.",
    "redecide": "Decide recorded requests again: each must go where it went.",
    "replay": "Drive an OpenAI-compatible API with recorded or generated turns, and measure each.",
    "report": "Find out which arm of a live experiment is better, and whether to believe it.",
    "simulate": "Send a workload through a simulated fleet, once for every policy, and compare.",
    "trace": "Look at recorded or generated workloads, and convert them.",
}

# transformers announces at import that there is no torch; here that is meant.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class _Group(click.Group):
    """A group whose further commands are found by name and imported late."""

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
        """List the commands with their summaries, without importing those of `SUMMARIES`."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))  # as click does
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summary(ctx, name, limit)) for name in names])

    def _summary(self, ctx: click.Context, name: str, limit: int) -> str:
        if name in SUMMARIES:
            return click.Command(name, help=SUMMARIES[name]).get_short_help_str(limit)
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"{exc.message} Commands: {known}.", ctx) from exc


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("warmroute"), message="warmroute %(version)s")
def main() -> None:
    """Cache-aware routing in front of vLLM: every turn goes where its KV cache is.

    \b
    Try it without a GPU:       warmroute demo
    In front of two engines:    warmroute serve --replica http://HOST:8001 --replica http://HOST:8002
    Is everything as it should? warmroute check, with the same options
    """
