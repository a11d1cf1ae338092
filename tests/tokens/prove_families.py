"""Our ids against vLLM's, family by family, on generated conversations.

python -m tests.tokens.prove_families prove --count 400    400 chats per family, half as many
                                           by each of the other APIs; now
python -m tests.tokens.prove_families record                golden/families.json, for the tests

`--newest` asks the newest release of vLLM, by its Python on the installed one's compiled parts
(tests/engines/overlay.py); `--sources` another one, from a wheel or a directory.

A family may be the file of a chat template. Kimi's are left out unless named: vLLM needs the code
of their tokenizers (`kimi_models`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import orjson

from loadtest.markdown import table
from router.api.anthropic import parse_messages
from router.api.openai import ChatRequest, Json, parse_chat
from router.api.responses import parse_responses
from router.base.engines import V0_32, Release, rules_of
from router.base.errors import ClientError
from router.tokens import NeedsEngine, Prompter, load_prompter
from tests.engines.overlay import PYTHON, environment, overlay, version_of
from tests.tokens import kimi_models
from tests.tokens.families import COUNT, DATE, FAMILIES, ONLY_PROVEN, SEED, bodies, family, model_of
from tests.tokens.vllm_routes import HERE, fingerprint

GOLDEN = HERE / "golden" / "families.json"

PARSERS: dict[str, Callable[[Json], ChatRequest]] = {
    "chat": parse_chat,
    "messages": parse_messages,
    "responses": parse_responses,
}


class Comparison(NamedTuple):
    """What was found: numbers of conversations."""

    wrong: list[int]
    wrongly_refused: list[int]
    num_equal: int
    num_for_engine: int


def load(name: str, release: Release = V0_32) -> Prompter:
    """Load what renders a family here, as an engine of this release does."""
    shown = family(name)
    with tempfile.TemporaryDirectory() as into:
        prompter = load_prompter(
            str(model_of(name, Path(into))),
            chat_template=shown.template,
            tokenizer_mode=shown.mode,
            local_files_only=True,
            release=release,
        )
    if shown.is_harmony:
        prompter.renderer.today = lambda: DATE
    return prompter


def ours(prompter: Prompter, body: Json, api: str) -> str:
    """Return the fingerprint of our ids for a body of one of the APIs.

    Raises:
        NeedsEngine: they are the engine's to make.
        ClientError: the conversation is refused.
    """
    plan = prompter.plan_chat(PARSERS[api](orjson.loads(orjson.dumps(body))))
    return fingerprint(prompter.commit(plan, plan.encode()).ids())


def compare(
    prompter: Prompter, name: str, api: str, seed: int, recorded: list[str | None]
) -> Comparison:
    """Compare our ids with the engine's for as many conversations as were recorded."""
    wrong: list[int] = []
    wrongly_refused: list[int] = []
    num_equal = num_for_engine = 0
    for index, body in enumerate(bodies(name, api, seed, len(recorded))):
        try:
            if ours(prompter, body, api) == recorded[index]:
                num_equal += 1
            else:
                wrong.append(index)
        except NeedsEngine:
            num_for_engine += recorded[index] is not None
        except ClientError:
            if recorded[index] is not None:
                wrongly_refused.append(index)
    return Comparison(wrong, wrongly_refused, num_equal, num_for_engine)


def ask_engine(
    names: list[str], seed: int, count: int, sources: Path | None = None
) -> dict[str, list[str | None]]:
    """Record by the interpreter that has vLLM; `sources`: an overlay of another release."""
    command = [str(PYTHON), "-m", "tests.tokens.families", *names]
    command += ["--seed", str(seed), "--count", str(count)]
    environ = environment(sources)
    answer = subprocess.run(
        command, stdout=subprocess.PIPE, cwd=HERE.parents[1], check=True, env=environ
    )
    found: dict[str, list[str | None]] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("record", "prove"))
    parser.add_argument("families", nargs="*")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--sources", type=Path)
    given = parser.parse_intermixed_args()
    sources = overlay(given.sources) if given.newest or given.sources else None
    release = rules_of(version_of(sources))
    known = FAMILIES if given.what == "record" else FAMILIES | ONLY_PROVEN
    names: list[str] = given.families or sorted(known.keys() - kimi_models.VERSIONS.keys())
    found = ask_engine(names, given.seed, given.count, sources)
    print(f"vLLM {version_of(sources)}")
    if given.what == "record":
        before = json.loads(GOLDEN.read_text())["families"] if GOLDEN.exists() else {}
        golden = {"seed": given.seed, "families": {**before, **found}}
        GOLDEN.write_text(json.dumps(golden, indent=0, sort_keys=True) + "\n")
    counts: dict[str, Counter[str]] = {}
    for name, recorded in found.items():
        named, _, api = name.rpartition(" ")
        seen = compare(load(named, release), named, api, given.seed, recorded)
        counts.setdefault(named, Counter()).update(_counts(seen, len(recorded)))
        for fault, numbers in (("wrong", seen.wrong), ("wrongly refused", seen.wrongly_refused)):
            if numbers:
                print(f"{name}, {fault}: {numbers[:10]}")
    counts["all"] = sum(counts.values(), Counter())
    header = ("conversations", "equal", "left to the engine", "refused by it", "wrong")
    rows = [[name, *(f"{of[column]:,}" for column in header)] for name, of in counts.items()]
    print(table(("family", *header), rows))
    sys.exit(counts["all"]["wrong"] > 0)


def _counts(seen: Comparison, num: int) -> dict[str, int]:
    """Share conversations out: each has one column of the table, and counts in the first."""
    num_wrong = len(seen.wrong) + len(seen.wrongly_refused)
    return {
        "conversations": num,
        "equal": seen.num_equal,
        "left to the engine": seen.num_for_engine,
        "refused by it": num - seen.num_equal - seen.num_for_engine - num_wrong,
        "wrong": num_wrong,
    }


if __name__ == "__main__":
    main()
