"""`warmroute page`: where the live page is."""

from __future__ import annotations

import sys

import click

from router.cli.admin import Admin, admin_options, echo_json


@click.command()
@admin_options
def page(admin: Admin) -> None:
    """Print a link to the live page.

    The page shows what the router does: caches, load, the queue, sessions, and why tokens were
    computed. On a terminal the link has your admin token, behind a #. A browser keeps that part to
    itself, and the page removes it from the address at once.
    """
    admin.ask("GET", "state")  # a link that does not work is none
    link = f"{admin.url.rstrip('/')}/"
    token = admin.token() if sys.stdout.isatty() else None
    if token is not None:
        link += f"#token={token}"
    echo_json({"url": link}) if admin.as_json else click.echo(link)
