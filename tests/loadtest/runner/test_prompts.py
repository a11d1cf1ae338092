"""What turns say: recorded messages as they are, hash ids as tokens that repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS
from loadtest.runner import ReplayError, ReplayOptions, replay
from loadtest.runner.options import Api
from loadtest.runner.prompts import make_prompts
from loadtest.workload import Turn
from tests.loadtest.runner.samples import chain, turn, workload

SAID = ({"role": "user", "content": "hello"},)
TOOLS = ({"type": "function", "function": {"name": "ls"}},)
WORDLESS = turn("s", 0, hash_ids=(1, 2), num_input_tokens=20)
SPOKEN = replace(turn("t", 0, hash_ids=(1,)), messages=SAID, tools=TOOLS)


def body(each: Turn, **options: Any) -> dict[str, Any]:
    return make_prompts(workload(each), ReplayOptions(**options)).body(each)


@pytest.mark.parametrize(
    ("api", "spoken", "wordless"),
    [
        ("auto", {"messages", "tools"}, {"prompt"}),
        ("chat", {"messages", "tools"}, {"messages"}),
        ("completions", {"prompt"}, {"prompt"}),
    ],
)
def test_the_table(api: Api, spoken: set[str], wordless: set[str]) -> None:
    """Which turns are a chat and which a completion is as the module's table says."""
    assert body(SPOKEN, api=api).keys() == spoken
    assert body(WORDLESS, api=api).keys() == wordless


def test_recorded_messages_go_as_they_are() -> None:
    """Without a salt not a byte of them is changed; with one they are new to every cache."""
    assert body(SPOKEN) == {"messages": list(SAID), "tools": TOOLS}
    assert body(SPOKEN, salt="x")["messages"] != list(SAID)


def test_salts_change_token_ids() -> None:
    """Another salt, other tokens; the same salt, the same."""
    plain, salted = body(WORDLESS)["prompt"], body(WORDLESS, salt="x")["prompt"]

    assert len(plain) == len(salted) == 20
    assert plain != salted
    assert salted == body(WORDLESS, salt="x")["prompt"]


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    """A tokenizer that cannot be read is named before anything is sent."""
    with pytest.raises(ReplayError, match=r"tokenizer\.json"):
        body(WORDLESS, tokenizer=str(tmp_path), api="chat")


@pytest.mark.parametrize("api", ["auto", "chat"])
async def test_what_repeats_is_cached(api: Api) -> None:
    """On an engine equal hash ids are cache hits, as token ids and as words."""
    options = EmulatorOptions(time_model=PRESETS["instant"], block_size=16)
    async with Emulator(options) as engine:
        run = await replay(chain(3), engine.url, options=ReplayOptions(api=api, loop="closed"))

    assert [result.error for result in run.turns] == [None] * 3
    found = [result.num_cached_tokens or 0 for result in run.turns]
    assert found[0] == 0
    assert found[1] >= 16  # a template's own tokens, in front, repeat too
    assert found[2] >= 32
