"""Whole sessions on two real engines behind each router: the real grid with other routers.

warmroute takes part with its default, without the queue, and on caches that never evict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich.progress import Progress

from loadtest.compare.arms import UNLIMITED
from loadtest.dev.peers.contestants import Contestant, Place
from loadtest.dev.studies import cells, real_grid
from loadtest.dev.studies.grid_run import DEFAULT, WITHOUT_QUEUE, GridRun
from loadtest.dev.studies.pair import Arm
from loadtest.engines.vllm import BLOCK_SIZE, Engine

OURS: Final = (DEFAULT, WITHOUT_QUEUE, UNLIMITED)
SEEDS: Final = (321, 322, 323)  # nothing was tuned on them
_SIZES: Final = ((1.7,), ("short",), (False,), ("small",))
CELLS: Final = (
    *cells.cells(*_SIZES, cells.PREFILLS),
    *cells.cells(*_SIZES, ("slow",), tiers=(4.0,)),
    *cells.cells(*_SIZES, ("slow",), 8, tiers=(4.0,)),
)
"""Contexts that take 1.7 times the caches, with nothing behind these, and with a CPU tier."""


def place(
    contestants: Sequence[Contestant],
    folder: Path,
    progress: Progress,
    found: Callable[[GridRun], None],
    *,
    is_quick: bool = False,
) -> None:
    """Run `CELLS` under every variant; two hours. `found` is called after each run.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start.
    """
    arms = [Arm(label=label) for label in OURS]
    arms += [_arm(one, folder) for one in contestants if one.package is not None]
    real_grid.run_all(
        CELLS[:1] if is_quick else CELLS,
        arms,
        SEEDS,
        progress,
        lambda run: found(replace(run, turns=())),
    )


def grid_of(paths: Sequence[Path]) -> tuple[GridRun, ...]:
    """Read the runs of earlier commands of the grid.

    Raises:
        OSError, ValueError: a file cannot be read, or is none of a grid.
    """
    runs = [run for path in paths for run in real_grid.read(path).runs]
    return tuple(replace(run, turns=()) for run in runs if run.kind == "real")


def _arm(contestant: Contestant, folder: Path) -> Arm:
    def command(port: int, metrics_port: int, engines: Sequence[Engine]) -> list[str]:
        place = Place(
            port=port,
            metrics_port=metrics_port,
            urls=tuple(engine.url for engine in engines),
            events=tuple(engine.events_endpoint for engine in engines),
            block_size=BLOCK_SIZE,
        )
        return [str(contestant.python(folder)), *contestant.command(place)]

    return Arm(label=contestant.name.replace("`", ""), command=command)
