"""Record what real engines of hybrid models publish, and what they say they reused.

    python -m tests.engines.record_kv_groups [NAME…]

Each engine gets the same requests, one at a time: prompts again, follow-ups, siblings, ends at and
between block boundaries, salts, answers that are asked about, and enough others to evict. Written
to tests/fixtures/kv_groups: the requests by their parts, the reported `cached_tokens`, and every
message, compressed.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import httpx

from tests.engines.harness import ENGINE_READY_S, REPOSITORY, Engine, EventTap
from tests.engines.hybrid_models import make_model, prompt_of

FIXTURES = REPOSITORY / "tests" / "fixtures" / "kv_groups"

ENGINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "windows": ("windows", ()),
    "windows-dense": ("windows", ("--prefix-cache-retention-interval", "64")),
    "convolutions": ("convolutions", ()),
    "convolutions-fine": ("convolutions", ("--block-size", "64", "--prefix-match-unit", "32")),
}
SPECULATING: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("windows", {"method": "eagle", "num_speculative_tokens": 2}),
    "mtp-windows": ("mtp-windows", {"method": "mtp", "num_speculative_tokens": 1}),
}
NUM_BLOCKS = 72
QUIET_S = 0.25  # the publisher looks every 0.1 s

Part = tuple[str, int]  # a text by its name, and how many of its tokens


def requests() -> list[dict[str, Any]]:
    """List the requests: `parts` of the prompt, `answer`: number of the request it goes on from."""
    table: list[dict[str, Any]] = [
        {"parts": parts}
        for parts in (
            [("a", 200)], [("a", 200)], [("a", 200), ("b", 100)], [("a", 200), ("b", 100)],
            [("a", 130), ("c", 70)], [("a", 130), ("d", 70)], [("a", 130), ("e", 70)],
            [("f", 40)], [("f", 40)], [("f", 40), ("g", 30)], [("f", 40), ("g", 60)],
            [("h", 192)], [("h", 192)], [("h", 192), ("i", 1)], [("h", 192), ("i", 64)],
            [("j", 100)], [("j", 100), ("k", 28)], [("j", 100), ("k", 29)], [("j", 100), ("k", 90)],
            [("l", 31)], [("l", 32)], [("l", 33)], [("l", 65)], [("l", 65)],
        )
    ]  # fmt: skip
    table += [
        {"parts": [("a", 200)], "salt": "t1"},
        {"parts": [("a", 200), ("m", 50)], "salt": "t1"},
        {"parts": [("n", 150)], "max_tokens": 70},
    ]
    table.append({"answer": len(table) - 1, "parts": [("o", 40)]})
    rng = random.Random("kv groups")
    for _ in range(45):
        root = rng.choice("pqrstu")
        parts: list[Part] = [(root, rng.randrange(30, 260))]
        if rng.random() < 0.6:
            parts.append((root + rng.choice("xyz"), rng.randrange(1, 120)))
        table.append({"parts": parts})
    return table


def ask(
    engine: Engine, tap: EventTap, prompt: list[int], request: dict[str, Any]
) -> dict[str, Any]:
    """Send a request; return it with what came of it, when its last message is there."""
    fields = {"max_tokens": request.get("max_tokens", 1), "return_token_ids": True}
    if "salt" in request:
        fields["cache_salt"] = request["salt"]
    num_before = len(tap.messages())
    answer = engine.complete(prompt, ignore_eos=True, **fields)
    num_messages = -1
    while num_messages != len(tap.messages()):
        num_messages = len(tap.messages())
        time.sleep(QUIET_S)
    row = request | {
        "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "messages": num_messages - num_before,
    }
    if fields["max_tokens"] > 1:
        row["answered"] = answer["choices"][0]["token_ids"]
    return row


def record(name: str) -> None:
    """Run one engine through the requests and write its fixture."""
    with tempfile.TemporaryDirectory() as directory:
        if name in SPECULATING:
            kind, drafts = SPECULATING[name]
            if drafts["method"] == "eagle":
                drafts = drafts | {"model": str(make_model("drafts", Path(directory) / "drafts"))}
            options: tuple[str, ...] = ("--speculative-config", json.dumps(drafts))
        else:
            kind, options = ENGINES[name]
        model = make_model(kind, Path(directory) / "model")
        engine = Engine(
            f"groups-{name}",
            Path(directory),
            num_blocks=NUM_BLOCKS,
            max_model_len=512,
            options=("--model", str(model), *options),
        )
        try:
            engine.start().wait_ready("/health", ENGINE_READY_S)
            version = httpx.get(f"{engine.url}/version").json()["version"]
            with EventTap(engine.events_endpoint) as tap:
                time.sleep(QUIET_S)  # its subscription arrives
                table: list[dict[str, Any]] = []
                for request in requests():
                    table.append(ask(engine, tap, prompt_of(request, table), request))
                messages = tap.messages()
        except BaseException:
            print(engine.tail(), file=sys.stderr)
            raise
        finally:
            engine.kill()
    packed = zlib.compress(json.dumps([m[2].hex() for m in messages]).encode(), 9)
    path = FIXTURES / f"vllm-{version}-{name}.json"
    lines = ",\n".join("  " + json.dumps(row) for row in table)
    described = {"drafts": drafts["method"]} if name in SPECULATING else {"options": list(options)}
    head = json.dumps({"model": kind, "block_size": 32, **described})[1:-1]
    body = base64.b64encode(packed).decode()
    path.write_text(f'{{{head},\n "requests": [\n{lines}\n ],\n "messages": "{body}"}}\n')
    num_removed = sum(bytes(m[2]).count(b"BlockRemoved") for m in messages)
    print(
        path.name, num_removed, "removed,", len(messages), "messages,", path.stat().st_size, "bytes"
    )


def main() -> None:
    """Record the engines named, or all."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or (*ENGINES, *SPECULATING):
        record(name)


if __name__ == "__main__":
    main()
