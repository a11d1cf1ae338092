"""AIPerf, NVIDIA's load generator, as it comes: it makes agent sessions and sends them to a router.

`install_aiperf.sh` installs it. Its helper processes find a tokenizer only in the cache of a model
hub, so `environ` writes one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from loadtest.engines.process import REPOSITORY
from loadtest.tiny_model import MODEL_DIR

AIPERF: Final = REPOSITORY / "build" / "aiperf" / "bin" / "aiperf"
SETTINGS: Final = Path(__file__).with_name("aiperf.json")
"""Sessions for engines of 1,200 blocks of 32 tokens."""
BLOCK_SIZE: Final = 64  # of the sessions, by `SETTINGS`
TIMEOUT_S: Final = 400.0  # of a run
MOONCAKE: Final = (
    "--custom-dataset-type", "mooncake-trace", "--isl-block-size", str(BLOCK_SIZE),
    "--no-fixed-schedule",
)  # fmt: skip
"""What `synthesize` makes."""
TRACES: Final = ("--custom-dataset-type", "weka_trace")
"""What `as_traces` makes."""
_TOKENIZER: Final = "lab/tiny"


class AiperfRun(Struct, frozen=True, kw_only=True):
    """What one run found, by AIPerf's records; cached tokens are those of the engines' usage."""

    num_requests: int
    num_errors: int
    num_prompt_tokens: int
    num_cached_tokens: int
    theoretical: float | None  # its own figure, of cached blocks; None: the format has none

    @property
    def cached(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.num_cached_tokens / self.num_prompt_tokens


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
    """Make sessions; their file."""
    out = folder / f"sessions-{seed}"
    words = ["synthesize", "agentic-code", "--config", str(SETTINGS), "--output", str(out)]
    run(folder, [*words, "--num-sessions", str(num_sessions), "--seed", str(seed)])
    [dataset] = out.glob("*/dataset.jsonl")
    return dataset


def profile(
    folder: Path, url: str, dataset: Path, format: Sequence[str], num_sessions: int
) -> AiperfRun:
    """Send whole sessions, all at once, through the router at `url`; `format` says what they are.

    AIPerf writes below `folder`.
    """
    out = folder / "run"
    own = ["--tokenizer", _TOKENIZER, "--ui", "none", "--output-artifact-dir", str(out)]
    run(folder, [*profile_words(url, dataset, format, num_sessions), *own])
    return run_of(out)


def profile_words(url: str, dataset: Path, format: Sequence[str], num_sessions: int) -> list[str]:
    """Write the command that sends whole sessions; docs/evaluate/aiperf.md has the same options."""
    return [
        "profile", "-m", "tiny", "--endpoint-type", "chat", "--streaming", "--url", url,
        "--input-file", str(dataset), *format, "--concurrency", str(num_sessions),
        "--num-sessions", str(num_sessions), "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true",
    ]  # fmt: skip


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


def run(folder: Path, words: Sequence[str]) -> None:
    """Run an AIPerf command to its end; if it fails, raise with what it wrote."""
    done = subprocess.run(
        [AIPERF, *words],
        cwd=folder,
        env=environ(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"aiperf {words[0]} failed: {(done.stdout + done.stderr)[-2_000:]}")


def correlation_ids(out: Path) -> set[str]:
    """List the names of the sessions of a run, as AIPerf sent them in headers."""
    return {str(record["metadata"]["x_correlation_id"]) for record in _records(out)}


def run_of(out: Path) -> AiperfRun:
    """Sum a run up from what AIPerf wrote."""
    records = _records(out)
    good = [record for record in records if not record.get("error")]
    summary = json.loads(_only(out, "profile_export_aiperf.json").read_text())
    theoretical = summary.get("theoretical_prefix_cache_hit")
    return AiperfRun(
        num_requests=len(records),
        num_errors=len(records) - len(good),
        num_prompt_tokens=_sum(good, "usage_prompt_tokens"),
        num_cached_tokens=_sum(good, "usage_prompt_cache_read_tokens"),
        theoretical=theoretical["avg"] / 100.0 if theoretical else None,
    )


def _sum(records: Sequence[Mapping[str, Any]], metric: str) -> int:
    values = [record["metrics"].get(metric, {}).get("value") for record in records]
    return round(sum(float(value or 0) for value in values))


def _records(out: Path) -> list[dict[str, Any]]:
    return _rows(_only(out, "profile_export.jsonl"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _only(out: Path, name: str) -> Path:
    [path] = out.rglob(name)
    return path
