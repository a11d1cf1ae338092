"""How much each router lets two real engines compute again: the real grid with others as arms.

warmroute stands there with its default, with its queue, and with its own hash of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich.progress import Progress

from loadtest.engines.vllm import BLOCK_SIZE, Engine
from loadtest.peers.contestants import Contestant, Place
from loadtest.studies import cells, real_grid
from loadtest.studies.grid_run import GridRun
from loadtest.studies.pair import Arm

OURS: Final = ("session_hash", "kv_aware", "kv_aware+queue")
SEEDS: Final = (101,)  # nothing was tuned on it


def placed(
    contestants: Sequence[Contestant], folder: Path, progress: Progress, *, is_quick: bool = False
) -> tuple[GridRun, ...]:
    """Run the grid's cells without a pool and with one; most of an hour.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start.
    """
    sets = cells.WORKING_SETS[:1] if is_quick else cells.WORKING_SETS
    arms = [Arm(label=label) for label in OURS]
    arms += [_arm(one, folder) for one in contestants if one.package is not None]
    runs: list[GridRun] = []
    chosen = cells.cells(sets, ("short",), cells.POOLS, ("small",))
    real_grid.run_all(chosen, arms, SEEDS, progress, runs.append)
    return tuple(replace(run, turns=()) for run in runs)


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
