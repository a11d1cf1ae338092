"""AIPerf, NVIDIA's load generator, as it comes: it makes agent sessions and sends them to a router.

It drives the public AgentX benchmark. `tests/engines/install_aiperf.sh` installs it. Its helper
processes find a tokenizer only in the cache of a model hub, so `environ` writes one.

    environ       where AIPerf finds the tiny model's tokenizer
    synthesize    `aiperf synthesize agentic-code`: sessions of one seed, without a network
    profile       `aiperf profile`: whole sessions through one router
    as_traces     the same sessions in the benchmark's own format; see there
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from msgspec import Struct
from rich.progress import Progress

from loadtest.dev.peers.contestants import Contestant
from loadtest.dev.peers.front import in_front
from loadtest.dev.studies import pair
from loadtest.engines.process import REPOSITORY
from loadtest.markdown import table
from loadtest.results import percentile
from loadtest.tiny_model import MODEL_DIR
from loadtest.whole_sessions import SessionTimes

AIPERF: Final = REPOSITORY / "build" / "aiperf" / "bin" / "aiperf"
SETTINGS: Final = Path(__file__).with_name("aiperf.json")
"""Sessions for engines of 1,200 blocks of 32 tokens."""
BLOCK_SIZE: Final = 64  # of the sessions, by `SETTINGS`
SEEDS: Final = (5, 6, 7)
NUM_SESSIONS: Final = 14
TIMEOUT_S: Final = 400.0  # of a run
_TOKENIZER: Final = "lab/tiny"
_SESSION_ID: Final = "AIPERF_HTTP_X_SESSION_ID_FROM_CORRELATION_ID"
"""Adds the header that vllm-router reads; warmroute knows those that AIPerf sends without it."""


class AiperfRun(Struct, frozen=True, kw_only=True):
    """What one run found, by AIPerf's records. `theoretical` is its own figure, of cached blocks.

    Times in seconds. Cached tokens are those of the engines' usage.
    """

    router: str
    seed: int
    num_requests: int
    num_errors: int
    num_prompt_tokens: int
    num_cached_tokens: int
    ttft_mean_s: float
    ttft_p99_s: float
    sessions: SessionTimes
    theoretical: float | None = None  # None: the data set's format has none

    @property
    def cached(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def environ(folder: Path) -> dict[str, str]:
    """Return the environment of AIPerf's commands, with all that they write below `folder`."""
    hub = folder / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    (hub / "refs").mkdir(parents=True, exist_ok=True)
    (hub / "refs" / "main").write_text("0")
    (hub / "snapshots").mkdir(exist_ok=True)
    if not (hub / "snapshots" / "0").exists():
        (hub / "snapshots" / "0").symlink_to(MODEL_DIR)
    own = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    return {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "COLUMNS": "200", **own}


def synthesize(folder: Path, num_sessions: int, seed: int) -> Path:
    """Make sessions; their file.

    Raises:
        FileNotFoundError, RuntimeError, subprocess.TimeoutExpired: as `run`.
    """
    out = folder / f"sessions-{seed}"
    words = ["synthesize", "agentic-code", "--config", str(SETTINGS), "--output", str(out)]
    run(folder, [*words, "--num-sessions", str(num_sessions), "--seed", str(seed)])
    [dataset] = out.glob("*/dataset.jsonl")
    return dataset


def profile(
    folder: Path,
    url: str,
    *,
    dataset: Path,
    format: Sequence[str],
    num_sessions: int,
    router: str,
    seed: int,
    more: Mapping[str, str] = {_SESSION_ID: "true"},
) -> AiperfRun:
    """Send whole sessions, all at once, through a router.

    Args:
        folder: For what AIPerf writes.
        url: Of the router.
        dataset: The sessions.
        format: Options that say what they are.
        num_sessions: How many there are.
        router: Its name.
        seed: Of the sessions.
        more: Variables of the environment.

    Raises:
        FileNotFoundError, RuntimeError, subprocess.TimeoutExpired: as `run`.
    """
    out = folder / f"run-{len(list(folder.glob('run-*')))}"
    own = ["--tokenizer", _TOKENIZER, "--ui", "none", "--output-artifact-dir", str(out)]
    run(folder, [*profile_words(url, dataset, format, num_sessions), *own], more)
    return run_of(out, router, seed)


def profile_words(url: str, dataset: Path, format: Sequence[str], num_sessions: int) -> list[str]:
    """Write the command that sends whole sessions; docs/evaluate/aiperf.md has the same options."""
    return [
        "profile", "-m", "tiny", "--endpoint-type", "chat", "--streaming", "--url", url,
        "--input-file", str(dataset), *format, "--concurrency", str(num_sessions),
        "--num-sessions", str(num_sessions), "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true",
    ]  # fmt: skip


MOONCAKE: Final = (
    "--custom-dataset-type", "mooncake-trace", "--isl-block-size", str(BLOCK_SIZE),
    "--no-fixed-schedule",
)  # fmt: skip
"""What `synthesize` makes."""
TRACES: Final = ("--custom-dataset-type", "weka_trace")
"""What `as_traces` makes."""


def as_traces(dataset: Path, folder: Path) -> Path:
    """Write sessions in the format of the AgentX benchmark's traces; their folder.

    Only for this format AIPerf says what caches without a limit would hit. It takes no blocks that
    traces share, so each has a system prompt of its own. Prompts are whole blocks here.
    """
    traces = folder / "traces"
    traces.mkdir()
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(dataset):
        rows.setdefault(row["session_id"], []).append(row)
    for name, of_session in rows.items():
        num_tokens, t_s, requests = 0, 0.0, []
        for row in of_session:
            num_blocks = -(-(num_tokens + row["input_length"]) // BLOCK_SIZE)
            t_s += row.get("delay", 0.0) / 1e3
            requests.append(
                {
                    "t": t_s,
                    "type": "s",
                    "model": "tiny",
                    "in": num_blocks * BLOCK_SIZE,
                    "out": row["output_length"],
                    "hash_ids": list(range(num_blocks)),
                    "think_time": row.get("delay", 0.0) / 1e3,
                    "api_time": 0.0,
                }
            )
            num_tokens = num_blocks * BLOCK_SIZE + row["output_length"]
        trace = {"id": name, "models": ["tiny"], "block_size": BLOCK_SIZE, "hash_id_scope": "local"}
        (traces / f"{name}.json").write_text(json.dumps({**trace, "requests": requests}))
    return traces


def run(folder: Path, words: Sequence[str], more: Mapping[str, str] = {}) -> str:
    """Run an AIPerf command to its end; what it wrote.

    Raises:
        FileNotFoundError: AIPerf is not installed.
        RuntimeError, subprocess.TimeoutExpired: it failed.
    """
    if not AIPERF.exists():
        raise FileNotFoundError(f"no AIPerf at {AIPERF}: run tests/engines/install_aiperf.sh")
    done = subprocess.run(
        [AIPERF, *words],
        cwd=folder,
        env={**environ(folder), **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"aiperf {words[0]} failed: {said[-2_000:]}")
    return said


def correlation_ids(out: Path) -> set[str]:
    """List the names of the sessions of a run, as AIPerf sent them in headers."""
    return {str(record["metadata"]["x_correlation_id"]) for record in _records(out)}


def run_of(out: Path, router: str, seed: int) -> AiperfRun:
    """Sum a run up from what AIPerf wrote."""
    records = _records(out)
    good = [record for record in records if not record.get("error")]
    ttfts_s = sorted(_value(record, "time_to_first_token") / 1e3 for record in good)
    summary = json.loads(_only(out, "profile_export_aiperf.json").read_text())
    theoretical = summary.get("theoretical_prefix_cache_hit")
    return AiperfRun(
        router=router,
        seed=seed,
        num_requests=len(records),
        num_errors=len(records) - len(good),
        num_prompt_tokens=round(sum(_value(each, "usage_prompt_tokens") for each in good)),
        num_cached_tokens=round(
            sum(_value(each, "usage_prompt_cache_read_tokens") for each in good)
        ),
        ttft_mean_s=fmean(ttfts_s) if ttfts_s else 0.0,
        ttft_p99_s=percentile(ttfts_s, 0.99),
        sessions=_sessions(good),
        theoretical=theoretical["avg"] / 100.0 if theoretical else None,
    )


def _records(out: Path) -> list[dict[str, Any]]:
    return _rows(_only(out, "profile_export.jsonl"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _only(out: Path, name: str) -> Path:
    [path] = out.rglob(name)
    return path


def _value(record: Mapping[str, Any], metric: str) -> float:
    """Read a metric of a record; 0 if it has none."""
    return float(record["metrics"].get(metric, {}).get("value") or 0)


def _sessions(records: Iterable[Mapping[str, Any]]) -> SessionTimes:
    """Measure whole sessions, from the first request to the last answer."""
    spans: dict[str, tuple[int, int]] = {}
    for record in records:
        of_it = record["metadata"]
        begin, end = spans.get(of_it["x_correlation_id"], (of_it["request_start_ns"], 0))
        spans[of_it["x_correlation_id"]] = (
            min(begin, of_it["request_start_ns"]),
            max(end, of_it["request_end_ns"]),
        )
    took_s = sorted((end - begin) / 1e9 for begin, end in spans.values())
    return SessionTimes(
        num_sessions=len(took_s),
        mean_s=fmean(took_s) if took_s else 0.0,
        p99_s=percentile(took_s, 0.99),
        longest_s=took_s[-1] if took_s else 0.0,
    )


def run_all(
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    folder: Path,
    progress: Progress,
    found: Callable[[AiperfRun], None],
    *,
    num_sessions: int = NUM_SESSIONS,
) -> None:
    """Run every router with the sessions of every seed, on two real engines; a minute and a half.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start.
        subprocess.TimeoutExpired: AIPerf did not end.
    """
    task = progress.add_task("AIPerf makes sessions", total=len(seeds) * len(contestants))
    with tempfile.TemporaryDirectory(prefix="aiperf-") as name:
        own = Path(name)
        sessions = {seed: synthesize(own, num_sessions, seed) for seed in seeds}
        progress.update(task, description="engines start")
        with pair.running(own, has_pool=False, prefill="slow") as both:
            for round_, seed in enumerate(seeds):
                for contestant in contestants if round_ % 2 == 0 else contestants[::-1]:
                    progress.update(task, description=f"{seed}: {contestant.name}")
                    for engine in both.engines:
                        engine.reset_prefix_cache()
                    urls = [engine.url for engine in both.engines]
                    found(
                        asyncio.run(_through(contestant, urls, folder, own, sessions[seed], seed))
                    )
                    progress.advance(task)


async def _through(
    contestant: Contestant,
    urls: Sequence[str],
    folder: Path,
    own: Path,
    dataset: Path,
    seed: int,
) -> AiperfRun:
    async with in_front(contestant, urls, folder, own) as front:
        return await asyncio.to_thread(
            profile,
            own,
            front.url,
            dataset=dataset,
            format=MOONCAKE,
            num_sessions=len({row["session_id"] for row in _rows(dataset)}),
            router=contestant.name,
            seed=seed,
        )


def lay_out(runs: Sequence[AiperfRun]) -> str:
    """Lay runs out, a row for each router: sums of tokens, means of times."""
    header = (
        "router", "requests, failed", "computed", "cached", "TTFT mean, P99, by seed",
        "a session takes, mean and longest",
    )  # fmt: skip
    rows = []
    for router in dict.fromkeys(run.router for run in runs):
        ours = sorted((run for run in runs if run.router == router), key=lambda run: run.seed)
        num_prompt_tokens = sum(run.num_prompt_tokens for run in ours)
        num_cached_tokens = sum(run.num_cached_tokens for run in ours)
        rows.append(
            (
                router,
                f"{sum(run.num_requests for run in ours):,}, {sum(run.num_errors for run in ours)}",
                f"{num_prompt_tokens - num_cached_tokens:,}",
                f"{num_cached_tokens / num_prompt_tokens:.1%}",
                "; ".join(f"{run.ttft_mean_s:.2f}, {run.ttft_p99_s:.1f} s" for run in ours),
                f"{fmean(run.sessions.mean_s for run in ours):.1f}, "
                f"{max(run.sessions.longest_s for run in ours):.0f} s",
            )
        )
    return table(header, rows)
