"""router.observers.early.next_prompt: what an answer says, from its bytes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.observers.early.next_prompt import MAX_BYTES, AnswerText, Held

CHAT = "/v1/chat/completions"
REASONED = b'{"messages": [{"role": "assistant", "reasoning": "hm"}]}'
PLAIN = b'{"messages": [{"role": "assistant", "content": "a"}]}'


def answer_of(path: str = CHAT, request: bytes = REASONED, held: Held | None = None) -> AnswerText:
    held = held or Held(1 << 30)
    return AnswerText(path, is_event_stream=True, request=request, held=held)


def stream(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def read(path: str, data: bytes, *, pieces: int = 7) -> AnswerText:
    """Read an answer that comes in pieces of so many bytes."""
    answer = answer_of(path)
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

    assert (answer.text.decode(), answer.reasoning.decode()) == ("Ä\nb", "hm")
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
        answer = answer_of()
        for piece in (stream(delta(content="a")), stream(spoken), b"data: [DONE]\n\n"):
            answer.take(piece)

        assert answer.seems_to_call is (spoken is event)


def test_a_long_stream_is_kept_as_text_only() -> None:
    """Bytes of events are not kept, and what is kept is counted."""
    held = Held(1 << 30)
    answer = answer_of(held=held)
    for _ in range(10_000):
        answer.take(stream(delta(content="ab")))

    assert 20_000 <= held.num_bytes < 20_000 + 17 * 1024
    answer.end()
    assert held.num_bytes == len(answer.text) == 20_000
    del answer
    assert held.num_bytes == 0


def test_all_answers_have_one_bound() -> None:
    """Answers beyond it have no text; they take no more bytes."""
    held = Held(100_000)
    answers = [answer_of(held=held) for _ in range(40)]
    for _ in range(200):
        for answer in answers:
            answer.take(stream(delta(content="some text")))
    for answer in answers:
        answer.end()

    assert held.num_bytes <= 100_000
    assert 0 < sum(not answer.is_bad for answer in answers) < 40
    assert sum(len(answer.text) for answer in answers) == held.num_bytes


@pytest.mark.parametrize(("request_", "num_kept"), [(PLAIN, 0), (REASONED, 1)])
def test_an_answer_without_reasoning_is_kept_if_its_conversation_has_some(
    request_: bytes, num_kept: int
) -> None:
    """Nothing is left out of the next prompt otherwise."""
    long, short = answer_of(request=request_), answer_of(request=request_)
    for _ in range(200):
        long.take(stream(delta(content="some text")))
    assert long.is_bad is not bool(num_kept)
    short.take(stream(delta(content="a"), delta("stop")))
    short.end()
    assert short.is_end_of_turn is bool(num_kept)

    thinking = answer_of(request=request_)
    thinking.take(stream(delta(reasoning="hm"), delta(content="a"), delta("stop")))
    thinking.end()
    assert thinking.is_end_of_turn


@pytest.mark.parametrize("data", [b"x" * MAX_BYTES, stream(delta(content="x" * MAX_BYTES))])
def test_what_is_too_long_has_no_text(data: bytes) -> None:
    """Whether it is one line or an answer."""
    held = Held(1 << 30)
    answer = answer_of(held=held)
    for start in range(0, len(data) + 10, 100_000):
        answer.take((data + b"y" * 100)[start : start + 100_000])
    answer.end()

    assert not answer.is_end_of_turn
    assert not answer.text
    assert held.num_bytes == 0


def test_messages_end_with_a_reason() -> None:
    """`end_turn` is the end of a turn, `tool_use` is not."""
    start = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
    thought = {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "t"}}

    def ending(reason: str) -> AnswerText:
        end = {"type": "message_delta", "delta": {"stop_reason": reason}}
        return read("/v1/messages", stream(thought, start, end))

    assert ending("end_turn").is_end_of_turn
    assert (ending("end_turn").text, ending("end_turn").reasoning) == (b"a", b"t")
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
    assert (ended(thought, message).text, ended(thought).reasoning) == (b"a", b"t")
    assert not ended(message, {"type": "function_call"}).is_end_of_turn
    assert not ended(message, status="incomplete").is_end_of_turn
