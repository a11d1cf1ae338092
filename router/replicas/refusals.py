"""Why the fleet has no candidate for a request: the errors that clients see.

No address is in them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final

from router.base.errors import NoReplicaAvailable, RouterError, UnknownModel
from router.replicas.candidate_state import state_of
from router.replicas.members import Member
from router.replicas.replica import Replica
from router.replicas.state import ON_PURPOSE

_MAX_RETRY_AFTER_S = 30.0
_SHOWN = 3  # replicas that an error names
_ADDRESS: Final = re.compile(r"^https?://\S+?:?\s+")  # that a reason begins with


def absent(waiting: Mapping[str, str], known: Container[str]) -> str:
    """List the replicas and sources that have not answered yet, with why; empty: none.

    Args:
        waiting: Why a replica is not usable (yet); those that are `known` did answer.
        known: Names of replicas.
    """
    shown = [
        f"{name} ({_ADDRESS.sub('', reason)})"
        for name, reason in waiting.items()
        if name not in known
    ]
    return _first(shown)


def no_replica(absent: str) -> NoReplicaAvailable:
    """Return the error for a fleet without any replica; `absent`: those that did not answer."""
    return NoReplicaAvailable(
        f"No replica has answered yet: {absent}." if absent else "No replica is configured."
    )


def unknown_model(model: str, served: Sequence[str], absent: str) -> RouterError:
    """Return the error for a model that no replica is known to serve."""
    if absent:  # one of these may serve it, so the client may come back
        return NoReplicaAvailable(
            f"No replica that has answered serves `{model}` "
            f"(served: {', '.join(served)}; not answered yet: {absent})."
        )
    hint = "; `models.aliases` can map claude-*" if model.startswith("claude-") else ""
    return UnknownModel(
        f"The model `{model}` does not exist (served: {', '.join(served)}{hint}).", param="model"
    )


def none_available(
    model: str | None, members: Iterable[Member], waits_s: Sequence[float], now_s: float
) -> NoReplicaAvailable:
    """Return the error for a model whose replicas are all out, draining or excluded.

    `waits_s`: until they may be tried again.
    """
    retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, min(waits_s, default=1.0)))
    what = "replica" if model is None else f"replica of `{model}`"
    return NoReplicaAvailable(
        f"No {what} can take a request now ({states_of(model, members, now_s)}).",
        retry_after_s=retry_after_s,
    )


def states_of(model: str | None, members: Iterable[Member], now_s: float) -> str:
    """Return in which state the first replicas of a model are, and why; None: of any."""
    states = [
        _shown(member, now_s) for member in members if model is None or member.replica.serves(model)
    ]
    return _first(states)


def check_roles(replicas: Sequence[Replica], *, is_split: bool) -> None:
    """Refuse a model whose replicas cannot answer by their roles.

    `is_split`: some replica has a role.

    Raises:
        NoReplicaAvailable: the message says which role to set.
    """
    if all(replica.role == "prefill" for replica in replicas):
        raise NoReplicaAvailable(
            "Every replica has role prefill, so none can answer. Set role: decode for some."
        )
    if not is_split and (producers := _producers(replicas)):
        raise NoReplicaAvailable(
            f"Only prompts are computed at {', '.join(producers)} (kv_producer), and no "
            "replica has a role. Set role: prefill there, and role: decode at the others."
        )


def _producers(replicas: Sequence[Replica]) -> list[str]:
    """Name the replicas that show that they compute prompts for others beside them.

    None, if all do. Only versions of vLLM count that other replicas here have, too: metrics of
    another version may have other names, and that is no reason to refuse requests.
    """
    others = {replica.version for replica in replicas if replica.seems != "prefill"}
    return [r.name for r in replicas if r.seems == "prefill" and r.version in others]


def _shown(member: Member, now_s: float) -> str:
    """Return in which state a replica is, and why."""
    replica, health = member.replica, member.health
    state = state_of(replica, health, now_s)
    reason = f" ({health.reason})" if health.reason and state not in ON_PURPOSE else ""
    return f"{replica.name}: {state}{reason}"


def _first(shown: Sequence[str]) -> str:
    more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return ", ".join([*shown[:_SHOWN], *more])
