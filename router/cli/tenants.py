"""`warmroute key`: a client key for a tenant."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from router.errors import ConfigError


@click.command()
@click.argument("name")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="tenants' file to add it to; made if there is none",
)
def key(name: str, file: Path | None) -> None:
    """Make a client key for the tenant NAME. It is printed once, and kept nowhere.

    The file (`tenants.file`) has its SHA-256 only. No slow hash is needed: a key has 256 random
    bits, which nothing guesses. With --file the tenant must be new; for a further key of one that
    is there, add the digest that is printed to its keys.
    """
    from router.tenants import entries

    try:
        if file is None:
            created, entry = entries.make(name)
        else:
            created, entry = entries.add(file, name), None
    except ConfigError as error:
        click.echo(f"warmroute: {error.message}", err=True)
        sys.exit(2)
    click.echo(created)
    click.echo(f"{name}: the key is shown this once", err=True)
    if entry is not None:
        click.echo(f"for the tenants' file:\n{entry.rstrip()}", err=True)
