"""router.observers.early.answer_text: what an answer says, from its bytes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.observers.early.answer_text import MAX_BYTES, AnswerText

CHAT = "/v1/chat/completions"


def stream(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def read(path: str, data: bytes, *, pieces: int = 7) -> AnswerText:
    """Read an answer that comes in pieces of so many bytes."""
    answer = AnswerText(path, is_event_stream=True)
    for start in range(0, len(data), pieces):
        answer.take(data[start : start + pieces])
    answer.end()
    return answer


@pytest.mark.parametrize("pieces", [1, 7, 10_000])
def test_a_chat_has_text_and_reasoning(pieces: int) -> None:
    """However its stream is cut."""
    data = stream(delta(role="assistant"), delta(reasoning="hm"), delta(content="Ä\n"))
    data += stream(delta(content="b"), delta("stop")) + b"data: [DONE]\n\n"

    answer = read(CHAT, data, pieces=pieces)

    assert ("".join(answer.text), "".join(answer.reasoning)) == ("Ä\nb", "hm")
    assert answer.is_end_of_turn


@pytest.mark.parametrize(
    "event",
    [
        delta("tool_calls"),
        delta("length"),
        delta("stop", tool_calls=[{"index": 0}]),
        {"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}]},
        {"error": {"message": "no"}},
        {"choices": [5]},
    ],
)
def test_other_ends_are_no_end_of_a_turn(event: dict[str, Any]) -> None:
    """A call of a tool, a cut, a second answer, an error, or what is not understood."""
    assert not read(CHAT, stream(delta(content="a"), event)).is_end_of_turn


@pytest.mark.parametrize(
    "event",
    [
        delta("tool_calls"),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "response.completed", "response": {"output": [{"type": "function_call"}]}},
    ],
)
def test_a_call_shows_at_the_end(event: dict[str, Any]) -> None:
    """So that few answers are kept until they are read."""
    for spoken in (event, delta("stop", tool_calls=[])):
        answer = AnswerText(CHAT, is_event_stream=True)
        for piece in (stream(delta(content="a")), stream(spoken), b"data: [DONE]\n\n"):
            answer.take(piece)

        assert answer.seems_to_call is (spoken is event)


def test_a_long_stream_is_kept_as_text_only() -> None:
    """Bytes of events are not kept."""
    answer = AnswerText(CHAT, is_event_stream=True)
    for _ in range(10_000):
        answer.take(stream(delta(content="ab")))

    assert answer.size_bytes < 20_000 + 65 * 1024
    answer.end()
    assert answer.num_bytes == 20_000


@pytest.mark.parametrize("data", [b"x" * MAX_BYTES, stream(delta(content="x" * MAX_BYTES))])
def test_what_is_too_long_has_no_text(data: bytes) -> None:
    """Whether it is one line or an answer."""
    answer = read(CHAT, data + b"y" * 10, pieces=100_000)

    assert not answer.is_end_of_turn
    assert not answer.text
    assert answer.size_bytes == 0


def test_messages_end_with_a_reason() -> None:
    """`end_turn` is the end of a turn, `tool_use` is not."""
    start = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
    thought = {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "t"}}

    def ending(reason: str) -> AnswerText:
        end = {"type": "message_delta", "delta": {"stop_reason": reason}}
        return read("/v1/messages", stream(thought, start, end))

    assert ending("end_turn").is_end_of_turn
    assert (ending("end_turn").text, ending("end_turn").reasoning) == (["a"], ["t"])
    assert not ending("tool_use").is_end_of_turn


def test_a_response_is_read_at_its_end() -> None:
    """A function call makes it no end of a turn."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "a"}]}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}

    def ended(*output: dict[str, Any], status: str = "completed") -> AnswerText:
        response = {"object": "response", "status": status, "output": output}
        end = {"type": "response.completed", "response": response}
        return read("/v1/responses", stream({"type": "response.output_text.delta"}, end))

    assert ended(thought, message).is_end_of_turn
    assert (ended(thought, message).text, ended(thought).reasoning) == (["a"], ["t"])
    assert not ended(message, {"type": "function_call"}).is_end_of_turn
    assert not ended(message, status="incomplete").is_end_of_turn
