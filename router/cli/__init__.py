"""The command line: what an operator types, and tables of what the admin API answers.

A file a subject: serve (the configuration), admin (the admin port), replicas, experiments, explain,
tenants. `group` finds the commands of other packages.
"""

from router.cli.admin import token
from router.cli.experiments import experiments
from router.cli.explain import explain
from router.cli.group import main
from router.cli.replicas import control, replicas
from router.cli.serve import check, options, policies, serve
from router.cli.tenants import key

__all__ = ["main"]

for _command in (
    check, control, experiments, explain, key, options, policies, replicas, serve, token
):  # fmt: skip
    main.add_command(_command)
