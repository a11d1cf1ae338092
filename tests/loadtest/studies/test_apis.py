from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadtest.agents import make_sessions
from loadtest.studies import apis
from loadtest.studies.api_turns import APIS, Api, Reported, body_of, read
from loadtest.studies.apis import PROFILE, ApiTurn, main, report, take_turns
from loadtest.tiny_model import MODEL_DIR
from router.tokens import load_prompter
from tests.faults.stage import Engines, on_stage
from tests.tokens.prove_families import ours

TURN = ApiTurn(
    api="chat",
    session_id="0-calm-s0",
    number=1,
    replica="r1",
    predicted=64,
    num_prompt_tokens=100,
    num_cached_tokens=64,
    num_left_tokens=96,
)


def test_a_turn_is_the_same_prompt_by_every_api() -> None:
    """With calls, parallel ones, too, and their results."""
    prompter = load_prompter(str(MODEL_DIR))
    session = make_sessions(replace(PROFILE, num_sessions=1, num_turns=12, turns_sigma=0.0))[0]
    num_calls = set()
    while (turn := session.next_turn()) is not None:
        ids = {ours(prompter, body_of(api, turn.body), api) for api in APIS}
        assert len(ids) == 1, turn.number
        session.advance("" if turn.number == 2 else None)
        num_calls |= {len(each.get("tool_calls", ())) for each in turn.body["messages"]}
    assert {1, 2} <= num_calls


async def test_turns_are_taken_by_every_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its session's turn before in a cache, and says so in its own way."""
    monkeypatch.setattr(apis, "NUM_AT_ONCE", 2)
    taken: list[ApiTurn] = []
    profile = replace(PROFILE, num_turns=2, turns_sigma=0.0)
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await take_turns(stage.url, 3, profile, taken.append)

    for api in APIS:
        of_api = [turn for turn in taken if turn.api == api]
        assert len(of_api) >= 3
        assert any(turn.num_cached_tokens for turn in of_api)
        for turn in of_api:
            assert turn.predicted is not None
            assert turn.num_prompt_tokens > turn.num_left_tokens
            assert (turn.num_left_tokens > 0) == (turn.number > 0)


@pytest.mark.parametrize("api", APIS)
def test_a_stream_without_usage_or_with_an_error_is_none(api: Api) -> None:
    """Neither is a turn of nought tokens."""
    with pytest.raises(ValueError, match="without usage"):
        read(api, [b"event: x", b"", b"data: [DONE]"])
    with pytest.raises(ValueError, match="error in the stream"):
        read(api, [b'data: {"type": "error", "error": {"message": "no"}}'])


def test_anthropics_prompt_is_a_sum() -> None:
    """Of what was read from a cache, what was written to one, and the rest."""
    line = (
        b'data: {"type": "message_delta", "usage": {"input_tokens": 3, "output_tokens": 9, '
        b'"cache_read_input_tokens": 64, "cache_creation_input_tokens": 32}}'
    )
    found = read("messages", [line])

    assert found == Reported(num_prompt_tokens=99, num_cached_tokens=64, text="")


def test_the_table() -> None:
    """By API and in all; what was predicted wrongly is named."""
    wrong = replace(TURN, api="responses", predicted=96)
    unknown = replace(TURN, api="responses", predicted=None, num_left_tokens=0)

    *_, chat, responses, all_, empty, first, second = report([TURN, wrong, unknown]).splitlines()

    assert chat == "| `/v1/chat/completions` | 1 | 100 | 64 | 1 | 1 | 100.0% |"
    assert responses == "| `/v1/responses` | 2 | 200 | 128 | 1 | 0 | 0.0% |"
    assert all_ == "| all | 3 | 300 | 192 | 2 | 1 | 33.3% |"
    assert empty == ""
    assert first.endswith("turn 1 on r1: predicted 96, reported 64 of 100")
    assert second.endswith("predicted None, reported 64 of 100")


def test_a_wrong_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With what is allowed."""
    with pytest.raises(SystemExit) as stopped:
        main(["--turns", "0"])

    assert stopped.value.code == 2
    assert "--turns 0: must be 1 or more" in capsys.readouterr().err
