"""`warmroute tenant-key`: a client key for a tenant."""

from __future__ import annotations

from pathlib import Path

import click

from router.base.errors import ConfigError
from router.cli.terminal import refuse


@click.command("tenant-key")
@click.argument("name")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Tenants' file to add it to; created if there is none.",
)
def tenant_key(name: str, file: Path | None) -> None:
    """Create a client key for the tenant NAME.

    The key is printed once and kept nowhere. The file (`tenants.file`) has its SHA-256 only. No
    slow hash is needed: a key has 256 random bits, which nothing guesses. With --file the tenant
    must be new; for a further key of a known tenant, add the printed digest to its keys.
    """
    from router.tenants import entries

    try:
        if file is None:
            created, entry = entries.make(name)
        else:
            created, entry = entries.add(file, name), None
    except ConfigError as error:
        refuse(error)
    click.echo(created)
    click.echo(f"{name}: the key is shown this once", err=True)
    if entry is not None:
        click.echo(f"for the tenants' file:\n{entry.rstrip()}", err=True)
