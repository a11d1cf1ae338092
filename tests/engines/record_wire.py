"""Record what real engines publish, as fixtures for tests that have no engine.

    python -m tests.engines.record_wire                      the installed vLLM, several contracts
    python -m tests.engines.record_wire OLD_PYTHON           an older vLLM (0.17: array shape)

Each engine has a cache of 24 blocks and gets the same few requests: plain, extended, salted,
enough others to evict, and after a reset of its cache one more. Written to tests/fixtures/wire:
the requests' token ids, every published message and a whole replay, raw frames as hex.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.engines.harness import (
    ENGINE_READY_S,
    REPOSITORY,
    Engine,
    EventTap,
    engine_python,
    replay,
    wait_until,
)

WIRE_DIR = REPOSITORY / "tests" / "fixtures" / "wire"

CONTRACTS: tuple[tuple[str, tuple[str, ...], Mapping[str, str]], ...] = (
    ("default", (), {}),
    ("seeded", (), {"PYTHONHASHSEED": "7"}),
    ("cbor", ("--prefix-caching-hash-algo", "sha256_cbor"), {}),
    ("xxhash", ("--prefix-caching-hash-algo", "xxhash"), {"PYTHONHASHSEED": "7"}),
    ("xxhash_cbor", ("--prefix-caching-hash-algo", "xxhash_cbor"), {"PYTHONHASHSEED": "0"}),
    ("bytes", (), {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}),
)
OLD_CONTRACTS = tuple(
    contract for contract in CONTRACTS if contract[0] in ("default", "seeded", "bytes")
)


def requests() -> list[dict[str, Any]]:
    """Draw the prompts: token ids below the tiny vocabulary, none of them special."""
    rng = random.Random("wire")

    def draw(num_tokens: int) -> list[int]:
        return rng.choices(range(300, 8000), k=num_tokens)

    plain = draw(100)
    others = [{"prompt": draw(230)} for _ in range(4)]
    return [
        {"prompt": plain},
        {"prompt": plain + draw(70)},
        {"prompt": plain, "cache_salt": "t1"},
        *others,
        {"reset": True},
        {"prompt": plain},
    ]


def record(name: str, python: Path, options: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Run one engine through the requests and write its fixture."""
    with tempfile.TemporaryDirectory() as logs:
        engine = Engine(
            f"wire-{name}",
            Path(logs),
            python=python,
            num_blocks=24,
            max_model_len=512,
            options=options,
            environ=environ,
        )
        try:
            engine.start().wait_ready("/health", ENGINE_READY_S)
            version = httpx.get(f"{engine.url}/version").json()["version"]
            with EventTap(engine.events_endpoint) as tap:
                for request in requests():
                    if "reset" in request:
                        httpx.post(f"{engine.url}/reset_prefix_cache").raise_for_status()
                    else:
                        engine.complete(**request)
                replies = replay(engine.replay_endpoint, 0)
                wait_until(lambda: len(tap.messages()) >= len(replies) - 1, 10, "all messages")
                messages = tap.messages()
        except BaseException:
            print(engine.tail(), file=sys.stderr)
            raise
        finally:
            engine.kill()
    path = WIRE_DIR / f"vllm-{version}-{name}.json"
    write(
        path,
        {
            "engine": f"vllm {version}",
            "options": list(options),
            "environ": dict(environ),
            "requests": requests(),
            "messages": [[frame.hex() for frame in message] for message in messages],
            "replay": [[frame.hex() for frame in reply] for reply in replies],
        },
    )
    print(f"{path.name}: {len(messages)} messages, {path.stat().st_size} bytes")


def write(path: Path, fixture: Mapping[str, Any]) -> None:
    """Write one fixture as JSON, a line for each request and message."""
    parts = []
    for key, value in fixture.items():
        if isinstance(value, list) and value:
            lines = ",\n".join("  " + json.dumps(item) for item in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    """Record every contract of the interpreter named, or of the installed one."""
    WIRE_DIR.mkdir(parents=True, exist_ok=True)
    old = len(sys.argv) > 1
    python = Path(sys.argv[1]) if old else engine_python()
    for name, options, environ in OLD_CONTRACTS if old else CONTRACTS:
        record(name, python, options, environ)


if __name__ == "__main__":
    main()
