"""The command line: what an operator types, and tables of what the admin API answers."""

from router.cli.commands import main

__all__ = ["main"]
