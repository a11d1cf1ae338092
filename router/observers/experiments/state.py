"""The state of an experiment: its definition and all orders since, as routers share it.

Two routers may know different orders. `merged` makes one state of both, in any order and however
often. Rules:

1. Of two starts (`id`) with one name, the later one counts.
2. Within one start: what is stopped, ended or removed anywhere is so everywhere, since the earliest
   time. Shares ordered anywhere count in the order of their times.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.base.decoding import decoder
from router.config.experiments import Experiment


class SharesChange(Struct, frozen=True, kw_only=True):
    """An order: shares of variants from a time on. It ends the definition's own ramp."""

    at_s: float  # unix seconds
    shares: dict[str, float]


class Stopped(Struct, frozen=True, kw_only=True):
    """Since when and why something is stopped; `guardrail` names the one that stopped it."""

    at_s: float
    reason: str
    guardrail: str | None = None


class State(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of an experiment, as it is stored."""

    id: str
    definition: Experiment
    started_s: float  # unix seconds
    changes: tuple[SharesChange, ...] = ()
    stopped: dict[str, Stopped] = {}  # by variant
    ended: Stopped | None = None
    removed: bool = False

    @property
    def is_running(self) -> bool:
        """Whether it claims its traffic."""
        return self.ended is None and not self.removed

    def timeline(self) -> list[tuple[float, dict[str, float]]]:
        """List the shares of all variants, each with the unix time since when, in order."""
        shares = self.definition.shares()
        line = [(self.started_s, shares)]
        until_s = self.changes[0].at_s if self.changes else float("inf")
        steps = [(self.started_s + step.after_s, step.shares) for step in self.definition.ramp]
        ordered = [(change.at_s, change.shares) for change in self.changes]
        for at_s, changed in (*(step for step in steps if step[0] < until_s), *ordered):
            shares = shares | changed
            line.append((at_s, shares))
        return line


def merged(ours: State, theirs: State) -> State:
    """Merge two states of the same name; see the module."""
    if ours.id != theirs.id:
        return max(ours, theirs, key=lambda state: (state.started_s, state.id))
    changes = {msgspec.json.encode(c, order="sorted"): c for c in (*ours.changes, *theirs.changes)}
    ordered = sorted(changes.items(), key=lambda item: (item[1].at_s, item[0]))
    return replace(
        ours,
        started_s=min(ours.started_s, theirs.started_s),
        changes=tuple(change for _, change in ordered),
        stopped={
            arm: _earliest(ours.stopped.get(arm), theirs.stopped.get(arm))
            for arm in sorted({*ours.stopped, *theirs.stopped})
        },
        ended=_earliest(ours.ended, theirs.ended),
        removed=ours.removed or theirs.removed,
    )


def _earliest(one: Stopped | None, other: Stopped | None) -> Any:
    given = [stopped for stopped in (one, other) if stopped is not None]
    return min(given, key=lambda s: (s.at_s, s.reason, s.guardrail or ""), default=None)


decode_state = decoder(State, "msgpack")
