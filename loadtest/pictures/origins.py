"""Where prompt tokens came from: a replica's GPU cache, its CPU cache, the pool, or computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from loadtest.pictures.look import INK, Rounds, counted, draw
from loadtest.results import TurnResult

_KINDS: Final = (
    ("gpu", "GPU cache", "#009E73", "white"),
    ("cpu", "CPU cache", "#56B4E9", INK),
    ("pool", "pool", "#0072B2", "white"),
    ("unknown", "cached, tier unknown", "#B9C3CC", INK),
    ("computed", "computed", "#E69F00", INK),
)
_ROOM: Final = 0.055  # share of the picture's width that a number needs
_BAR: Final = 0.62


class Origin(Struct, frozen=True, kw_only=True):
    """Tokens of the prompts of one variant, by where they came from.

    `unknown` were cached, as the engine reports, beyond what the router predicted.
    """

    num_turns: int
    gpu: int
    cpu: int
    pool: int
    unknown: int
    computed: int

    @property
    def total(self) -> int:
        """Count all prompt tokens."""
        return self.gpu + self.cpu + self.pool + self.unknown + self.computed


def origin(turns: Iterable[TurnResult]) -> Origin:
    """Split the prompts: engines say how much was cached, the router in which tier.

    What neither reports is not guessed: turns without both token counts are left out, and
    cached tokens beyond the prediction are of unknown tier.
    """
    sums = dict.fromkeys(("gpu", "cpu", "pool", "unknown", "computed"), 0)
    num_turns = 0
    for turn in counted(turns):
        if turn.num_prompt_tokens is None or turn.num_cached_tokens is None:
            continue
        num_turns += 1
        left = turn.num_cached_tokens
        if turn.predicted is not None:
            for tier in ("gpu", "cpu", "pool"):
                from_tier = min(left, getattr(turn.predicted, tier))
                sums[tier] += from_tier
                left -= from_tier
        sums["unknown"] += left
        sums["computed"] += turn.num_computed_tokens
    return Origin(num_turns=num_turns, **sums)


def origins(arms: Rounds) -> bytes | None:
    """Draw one bar per variant, in tokens per turn. None: no turn reports them."""
    found = {
        label: origin(turn for turns in rounds for turn in turns) for label, rounds in arms.items()
    }
    found = {label: parts for label, parts in found.items() if parts.total}
    if not found:
        return None
    return draw(
        lambda figure: paint_origins(figure.subplots(), found), height=1.3 + 0.46 * len(found)
    )


def paint_origins(axis: Any, found: Mapping[str, Origin]) -> None:
    """Draw stacked bars, tokens per turn, the first variant on top; numbers where they fit."""
    labels = list(found)[::-1]
    totals = [found[label].total / found[label].num_turns for label in labels]
    widest = max(totals)
    begin = [0.0] * len(labels)
    for kind, name, colour, ink in _KINDS:
        sizes = [getattr(found[label], kind) / found[label].num_turns for label in labels]
        if not any(sizes):
            continue
        axis.barh(labels, sizes, _BAR, left=begin, color=colour, label=name,
                  edgecolor="white", linewidth=0.8)  # fmt: skip
        for row, (at, size) in enumerate(zip(begin, sizes, strict=True)):
            if size / widest >= _ROOM:
                axis.text(at + size / 2, row, short(size), color=ink, fontsize=8.5,
                          ha="center", va="center")  # fmt: skip
        begin = [at + size for at, size in zip(begin, sizes, strict=True)]
    for row, label in enumerate(labels):
        share = 1 - found[label].computed / found[label].total
        axis.text(totals[row] + widest * 0.012, row, f"{share:.1%} hit", va="center", fontsize=9)
    axis.set_xlim(0, widest * 1.12)
    axis.set_xlabel("prompt tokens per turn")
    axis.xaxis.set_major_formatter(lambda value, _: short(value))
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0, labelcolor=INK)
    axis.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=len(_KINDS), handlelength=1.0,
        columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip


def short(count: float) -> str:
    """Write a count: 812, 12.3K, 412K, 1.43M."""
    if count < 999.5:
        return f"{count:.0f}"
    if count < 999_500:
        return f"{count / 1e3:.1f}K" if count < 99_950 else f"{count / 1e3:.0f}K"
    return f"{count / 1e6:.2f}M"
