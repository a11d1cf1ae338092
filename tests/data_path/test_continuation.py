"""router.data_path.continuation: one stream for the client, however its engines break off."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer

from loadtest.emulator.replies import ReplyRules, ReplyWriter
from loadtest.emulator.tokens import ChatTokenizer
from loadtest.emulator.wire import DONE, Api, ChunkWriter, Head, Usage, usage_chunk
from loadtest.tiny_model import MODEL_DIR
from router.data_path.continuation import Continuation
from router.data_path.terms import NotContinued, Terms, terms_of
from router.tokens.encoder import TextEncoder

PROMPT = list(range(100, 140))
NUM_TOKENS = 6

encoder = TextEncoder(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")))
writer = ReplyWriter(ChatTokenizer(MODEL_DIR), seed=0)


class Asked:
    """A request, and the engines that answer it: greedily, each under ids and a time of its own."""

    def __init__(self, api: Api, *, median_tokens: int = 1_000_000, **fields: Any) -> None:
        self.api = api
        self.median_tokens = median_tokens
        self.body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": NUM_TOKENS}
        self.body |= {"messages": []} if api == "chat" else {"prompt": PROMPT}
        self.body |= fields
        self.num_engines = 0
        self.following: list[bytes] = []  # another engine's events

    @property
    def terms(self) -> Terms:
        terms = terms_of(self.body, is_chat=self.api == "chat")
        assert isinstance(terms, Terms), terms
        return terms

    def answer(self, fields: dict[str, Any] | None = None) -> list[bytes]:
        """Answer the request, with some fields changed, as one engine would: its events."""
        body = self.body | (fields or {})
        given = body.get("kv_transfer_params", {}).get("prompt_token_ids") or body.get("prompt")
        ids: list[int] = given or PROMPT
        options = body.get("stream_options") or {}
        rules = ReplyRules(
            max_tokens=body["max_tokens"],
            min_tokens=body.get("min_tokens", 0),
            stop=body.get("stop", ()),
            median_tokens=self.median_tokens,
        )
        reply = writer.greedy(ids, rules)
        self.num_engines += 1
        head = Head(
            id=f"id-{self.num_engines}", created=self.num_engines, model="tiny", api=self.api
        )
        wants_ids = body.get("return_token_ids") is True
        chunks = ChunkWriter(
            head,
            0,
            reply,
            return_token_ids=wants_ids,
            usage_follows=options.get("include_usage") is True,
        )

        def usage(num: int) -> Usage:
            return Usage(
                num_prompt_tokens=len(ids),
                num_completion_tokens=num,
                num_cached_tokens=8,
                num_created_tokens=None,
            )

        is_continuous = options.get("continuous_usage_stats") is True
        prompt_ids = ids if wants_ids else None
        events = []
        if self.api == "chat":
            events.append(chunks.role(usage(0) if is_continuous else None, prompt_ids))
        events += [
            chunks.tokens(
                i, i + 1, usage(i + 1) if is_continuous else None, prompt_ids if i == 0 else None
            )
            for i in range(len(reply.ids))
        ]
        if options.get("include_usage"):
            events.append(usage_chunk(head, usage(len(reply.ids))))
        return [*events, DONE]


def go_on(asked: Asked, stream: Continuation) -> bytes:
    """Do what the pipeline does when an engine breaks off, and return the rest of the stream."""
    transcript, terms = stream.check(), stream.terms
    if transcript.finish_reason is not None and not stream.lacks_usage:
        return stream.conclusion()
    ids = transcript.ids.tolist() if terms.returns_ids else known_ids(stream)
    if stream.is_spent(len(ids)):
        return stream.conclusion(num_prompt_tokens=len(PROMPT), num_text_tokens=len(ids))
    asked.following = asked.answer(stream.resume(PROMPT, ids))
    return b"".join(map(stream.feed, asked.following))


def known_ids(stream: Continuation) -> list[int]:
    ids = encoder.encode_behind(PROMPT, stream.check().text, skip_special_tokens=True)
    assert ids is not None
    return ids.tolist()


def pieces(data: bytes, dice: random.Random) -> Iterator[bytes]:
    """Cut bytes at random places."""
    while data:
        size = dice.choice([1, 3, 40, 200, 5000])
        yield data[:size]
        data = data[size:]


def shape(body: bytes) -> dict[str, Any]:
    """Put together what a client makes of a stream; what an engine alone knows is left out."""
    assert body.endswith(DONE)
    events = [orjson.loads(line[6:]) for line in body.split(b"\n\n")[:-2]]
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    usages = [event["usage"] for event in events if event.get("usage")]
    for usage in usages:
        usage.pop("prompt_tokens_details", None)
        usage.pop("completion_tokens_details", None)
    return {
        "heads": {(event["id"], event["created"], event["model"]) for event in events},
        "roles": [delta["role"] for delta in deltas if delta.get("role")],
        "text": "".join(delta.get("content") or "" for delta in deltas),
        "ids": [i for choice in choices for i in choice.get("token_ids") or ()],
        "prompt_ids": [
            part["prompt_token_ids"]
            for event in events
            for part in (event, *event["choices"])
            if part.get("prompt_token_ids")
        ],
        "finish": [c["finish_reason"] for c in choices if c.get("finish_reason")],
        "usages": usages if len(usages) > 1 else None,
        "usage": usages[-1] if usages else None,
        "done": body.count(DONE),
    }


USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("fields", "step"),
    [
        ({}, 5),
        (USAGE, 1),
        (CONTINUOUS, 7),
        (USAGE | {"return_token_ids": True}, 7),
        (USAGE | {"median_tokens": 3}, 3),
        (USAGE | {"median_tokens": 3, "min_tokens": 4, "return_token_ids": True}, 5),
    ],
    ids=["plain", "usage", "continuous", "ids", "eos", "min"],
)
@pytest.mark.parametrize("api", ["chat", "completion"])
def test_wherever_an_engine_breaks_off_the_client_has_the_same_answer(
    api: Api, fields: dict[str, Any], step: int
) -> None:
    """At any byte of its stream: inside of events, between them, before usage, in `[DONE]`."""
    asked = Asked(api, **fields)
    whole = b"".join(asked.answer())
    expected = shape(whole) | {"heads": {("id-1", 1, "tiny")}}
    for cut in range(whole.index(b"\n\n") + 2, len(whole), step):
        asked.num_engines = 1
        stream = Continuation(asked.terms)
        given = stream.feed(whole[:cut])
        assert whole.startswith(given)
        assert given.endswith(b"\n\n")

        assert shape(given + go_on(asked, stream)) == expected, cut


def test_an_answer_goes_on_twice() -> None:
    """Usage counts what all engines generated, and the role is said once."""
    asked = Asked("chat", **USAGE)
    whole = asked.answer()
    stream = Continuation(asked.terms)
    given = stream.feed(b"".join(whole[:3]))
    second = asked.answer(stream.resume(PROMPT, known_ids(stream)))
    given += stream.feed(b"".join(second[:3]))
    given += go_on(asked, stream)

    assert shape(given) == shape(b"".join(whole))
    assert stream.engine_usage is not None
    assert stream.engine_usage.prompt_tokens == len(PROMPT) + 4


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_stream_passes_byte_for_byte(seed: int) -> None:
    """In whatever pieces it comes; and each piece that goes on is one of whole events."""
    dice = random.Random(seed)
    end = dice.choice([b"\n\n", b"\r\n\r\n"])
    asked = Asked("chat", max_tokens=400, **USAGE)
    whole = b"".join(asked.answer()).replace(b"\n\n", end)
    stream = Continuation(asked.terms)
    given = b""
    for piece in pieces(whole, dice):
        part = stream.feed(piece)
        given += part

        assert not part or part.endswith(end)
    assert given + stream.end() == whole
    assert stream.is_whole
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 400


@pytest.mark.parametrize("seed", range(30))
def test_a_spoilt_stream_is_refused_and_nothing_worse(seed: int) -> None:
    """Whatever its bytes are, from the first engine or from the one that goes on."""
    dice = random.Random(seed)

    def spoilt(events: list[bytes]) -> bytes:
        data = bytearray(b"".join(events))
        for _ in range(dice.randrange(1, 12)):
            at = dice.randrange(len(data))
            junk = dice.choice([b"\xff", b"null", b"[", b'"', b"\n\n", b"{}", b"1e999", b"[[[[["])
            data[at : at + dice.randrange(8)] = junk
        return bytes(data)

    asked = Asked("chat", **USAGE)
    stream = Continuation(asked.terms)
    try:
        stream.feed(spoilt(asked.answer()[:5]))
        transcript = stream.check()
        assert isinstance(transcript.text, str)
        following = asked.answer(stream.resume(PROMPT, [7, 8]))
        given = stream.feed(b"".join(following[:1]) + spoilt(following[1:]))

        assert given.endswith(b"\n\n")
    except NotContinued:
        pass  # what else it raises fails the test


def test_a_text_that_speaks_of_errors_is_no_error() -> None:
    """JSON escapes its quotes."""
    stream = Continuation(Asked("completion").terms)
    event = b"data: " + orjson.dumps({"choices": [{"text": 'data: {"error": {"code": 500}}'}]})

    assert stream.feed(event + b"\n\n") == event + b"\n\n"
    assert not stream.failure


def test_an_engines_own_error_is_kept_back() -> None:
    """With what comes behind it; events before it are the client's."""
    asked = Asked("completion")
    stream = Continuation(asked.terms)
    event = asked.answer()[0]
    error = b'data: {"error": {"message": "dead", "type": "x", "param": null, "code": 500}}\n\n'

    assert stream.feed(event + error + DONE) == event
    assert stream.failure == error + DONE


def test_a_clients_own_error_is_passed_on() -> None:
    """It would be the same at any replica."""
    stream = Continuation(Asked("completion").terms)
    error = b'data: {"error": {"message": "no", "type": "x", "param": null, "code": 400}}\n\n'

    assert stream.feed(error) == error


def test_an_engine_that_begins_again_is_not_believed() -> None:
    """One that does not know the field answers the first prompt: its prompt's ids tell."""
    asked = Asked("chat")
    stream = Continuation(asked.terms)
    stream.feed(b"".join(asked.answer()[:3]))
    stream.resume(PROMPT, [1, 2])

    with pytest.raises(NotContinued, match="proof"):
        stream.feed(b"".join(asked.answer({"return_token_ids": True})))


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"choices": [{"delta": {"reasoning": "hm"}}]}, "reasoning"),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, "tools"),
        ({"choices": [{"index": 1, "delta": {"content": "a"}}]}, "choices"),
        ({"choices": [{"delta": {"content": 7}}]}, "stream"),
    ],
)
def test_what_an_answer_says_may_forbid_it(event: dict[str, Any], reason: str) -> None:
    """Its text alone is then not what was generated."""
    stream = Continuation(Asked("chat").terms)
    stream.feed(b"data: " + orjson.dumps(event) + b"\n\n")

    with pytest.raises(NotContinued, match=reason):
        stream.check()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{}]}, "tools"),
        ({"n": 2}, "choices"),
        ({"prompt": ["a", "b"]}, "choices"),
        ({"logprobs": 0}, "logprobs"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "structured"),
        ({"structured_outputs": {"regex": "a"}}, "structured"),
        ({"presence_penalty": 0.1}, "sampling"),
        ({"seed": 3}, "sampling"),
        ({"bad_words": ["a"]}, "sampling"),
        ({"echo": True}, "echo"),
        ({"include_stop_str_in_output": True}, "stop"),
        ({"include_reasoning": False}, "reasoning"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "field"),
        ({"a_field_of_tomorrow": 1}, "field"),
        ({"max_tokens": "7"}, "field"),
    ],
)
def test_what_a_request_asks_may_forbid_it(fields: dict[str, Any], reason: str) -> None:
    """Whatever looks back at the output, or is not known here."""
    body = {"model": "tiny", "messages": [], "stream": True} | fields

    assert terms_of(body, is_chat=True) == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "tools": None, "seed": 3, "temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "stop": ["a"], "repetition_penalty": 1.1},
        {"response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0},
    ],
)
def test_what_changes_nothing_forbids_nothing(fields: dict[str, Any]) -> None:
    """A field may be there with the value that it has without."""
    assert isinstance(terms_of({"messages": [], "stream": True} | fields, is_chat=True), Terms)


def test_a_completion_that_names_no_length_has_sixteen_tokens() -> None:
    """As the engine takes it; a chat goes on as far as the engine lets it."""
    completion = terms_of({"prompt": "a"}, is_chat=False)
    chat = terms_of({"messages": [], "max_tokens": 9, "max_completion_tokens": 5}, is_chat=True)

    assert isinstance(completion, Terms)
    assert isinstance(chat, Terms)
    assert (completion.max_tokens, chat.max_tokens) == (16, 5)
    assert Continuation(completion).resume([1], [2, 3])["max_tokens"] == 14
    assert Continuation(chat).resume([1], [2])["max_completion_tokens"] == 4


@pytest.mark.parametrize(
    ("text", "ids"),
    [(" hello", True), ("", True), ("\ufffd", False), ("a<|im_end|>b", False)],
)
def test_a_text_is_encoded_only_if_its_ids_say_it_again(text: str, ids: bool) -> None:
    """Bytes that are no text, and text that looks like a special token, are not."""
    encoded = encoder.encode_behind(PROMPT, text, skip_special_tokens=True)

    assert (encoded is not None) == ids


def test_ids_that_end_inside_a_character_are_noticed() -> None:
    """An engine that went on from there would say the whole prompt."""
    ids = encoder.encode_whole("a 𒀀", add_special_tokens=False).tolist()

    assert encoder.ends_in_text(ids)
    assert not encoder.ends_in_text(ids[:-1])
