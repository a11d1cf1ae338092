"""The command line: what an operator types, and tables of what the admin API answers.

A file a subject: serve (the configuration), admin (the admin port), status, watch, sessions,
replicas. `group` finds the commands of other packages, `config_options` has `--set` and the flags
of keys, `terminal` writes.
"""

from router.cli.admin import admin_token
from router.cli.group import main
from router.cli.replicas import engine, replicas
from router.cli.serve import check, options, policies, schema, serve, tenant_key
from router.cli.sessions import why
from router.cli.status import page, status
from router.cli.watch import tail

__all__ = ["main"]

for _command in (
    admin_token,
    check,
    engine,
    options,
    page,
    policies,
    replicas,
    schema,
    serve,
    status,
    tail,
    tenant_key,
    why,
):
    main.add_command(_command)
