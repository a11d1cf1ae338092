"""A stream that outlives its engine: what its client has, and how another engine goes on with it.

What must live here: the request that continues a stream, and the other engine's events as the
client's own stream goes on with them. What must not: I/O and the choice of that engine (relay),
which requests may be continued (terms), how text becomes tokens (tokenize). Bytes in, bytes out.

The first engine's bytes pass unread; whole events only, so that what is kept is what the client
has. They are parsed when the engine dies (or when `_FOLD_BYTES` of them have been kept).

    engine 1   id, role, "The", " cat", " s         the broken event never reached the client
    engine 2   prompt = prompt 1 + "The cat"        by token ids; it returns them: they must agree
               role, " sat", usage, [DONE]          its role is dropped, id and usage are made one

An answer goes on from token ids: the engine's own where the client asked for them, else those of
the prompt, known here and proven, and those of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import orjson

from router.api.stream_events import (
    DONE,
    ERROR,
    Chunk,
    Transcript,
    data_of,
    end_of_events,
    is_failure,
)
from router.api.usage import Usage, usage_of_stream
from router.data_path.terms import NotContinued, Terms

_FOLD_BYTES: Final = 64 * 1024  # some 270 events: half a millisecond to read, now and then
_MAX_HELD_BYTES: Final = 1024 * 1024  # of an event without an end


def is_whole(answer: bytes) -> bool:
    """Return whether a stream that has ended was a whole answer, at a glance."""
    return answer.rstrip().endswith(DONE) and ERROR not in answer


class Continuation:
    """One client's stream, from whichever engine its events come.

    failure: An engine's own error, kept back from the client with all that came behind it.
    engine_usage: What the engine of now says of its own request; None: nothing (yet).
    """

    __slots__ = (
        "_held",
        "_is_proven",
        "_kept",
        "_num_generated",
        "_prompt_ids",
        "_sent_ids",
        "_terms",
        "_transcript",
        "engine_usage",
        "failure",
    )

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._transcript = Transcript()
        self._kept = bytearray()  # events the client has, not read yet
        self._held = b""  # the beginning of the next one
        self._prompt_ids: Sequence[int] = ()
        self._sent_ids: list[int] | None = None  # the continued prompt; None: not continued (yet)
        self._num_generated = 0  # of it, what earlier engines generated
        self._is_proven = False
        self.failure = b""
        self.engine_usage: Usage | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Take what an engine sent and return what the client gets now: whole events.

        Raises:
            NotContinued: the engine does not go on with what it was given.
        """
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if self.failure:
            self.failure += chunk
            return b""
        if not chunk.endswith(b"\n\n"):
            end = end_of_events(chunk)
            self._held, chunk = chunk[end:], chunk[:end]
            if len(self._held) > _MAX_HELD_BYTES:
                if self._sent_ids is not None:
                    raise NotContinued("stream")
                chunk, self._held = chunk + self._held, b""
                self._transcript.unsound = "stream"
        at = chunk.find(ERROR)
        if at >= 0 and is_failure(chunk[at:]):
            self.failure, self._held = chunk[at:] + self._held, b""
            chunk = chunk[:at]
        if self._sent_ids is not None:
            return self._rewritten(chunk)
        kept = self._kept
        kept += chunk
        if len(kept) > _FOLD_BYTES:
            self._fold()
        return chunk

    def end(self) -> bytes:
        """Return what is left to pass on where an engine has ended its stream properly."""
        held, self._held = self._held, b""
        return held

    @property
    def is_whole(self) -> bool:
        """Whether the client has the end of the answer."""
        if DONE in self._kept:
            return True
        transcript = self.transcript
        return transcript.is_done or transcript.finish_reason is not None

    @property
    def usage(self) -> Usage | None:
        """What the engine of now reported of its own request."""
        if self._sent_ids is not None:
            return self.engine_usage
        return usage_of_stream(bytes(self._kept)) or self._transcript.usage

    @property
    def transcript(self) -> Transcript:
        """What the client has of the answer; read now, as far as it was not."""
        self._fold()
        return self._transcript

    def _fold(self) -> None:
        if self._kept:
            self._transcript.read(bytes(self._kept))
            self._kept.clear()

    # ---------------------------------------------------------------- going on elsewhere

    @property
    def terms(self) -> Terms:
        return self._terms

    def check(self) -> Transcript:
        """Return what the client has, once it is sure that it can be gone on with.

        Raises:
            NotContinued: it cannot.
        """
        transcript = self.transcript
        if transcript.unsound is not None:
            raise NotContinued(transcript.unsound)
        if self._terms.returns_ids and self._terms.has_stop:
            raise NotContinued("stop")  # ids run ahead of the text that is held back for it
        return transcript

    def resume(self, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> dict[str, Any]:
        """Begin anew at another engine: return the fields that its request has differently.

        What was held back of the broken engine's is dropped. `generated_ids` are those of all
        that the client has.
        """
        self._held = self.failure = b""
        self._prompt_ids = prompt_ids
        self._sent_ids = [*prompt_ids, *generated_ids]
        self._num_generated = len(generated_ids)
        self._is_proven = False
        self.engine_usage = None
        terms = self._terms
        fields: dict[str, Any] = {
            "return_token_ids": True,
            "stream_options": {
                "include_usage": True,
                "continuous_usage_stats": terms.has_continuous_usage,
            },
        }
        if terms.is_chat:
            fields["kv_transfer_params"] = {"prompt_token_ids": self._sent_ids}
        else:
            fields["prompt"] = self._sent_ids
        if terms.max_tokens is not None:
            fields[terms.max_field] = terms.max_tokens - self._num_generated
        if terms.min_tokens:
            fields["min_tokens"] = max(0, terms.min_tokens - self._num_generated)
        return fields

    @property
    def lacks_usage(self) -> bool:
        """Whether the client still has to get its usage."""
        return self._terms.includes_usage and self._transcript.num_reported_tokens is None

    def is_spent(self, num_generated_tokens: int) -> bool:
        """Return whether the client has every token that it may have."""
        most = self._terms.max_tokens
        is_full = most is not None and num_generated_tokens >= most
        return is_full or self._transcript.finish_reason is not None

    def conclusion(self, *, num_prompt_tokens: int = 0, num_text_tokens: int = 0) -> bytes:
        """Write the end of an answer of which the client has every token.

        Args:
            num_prompt_tokens, num_text_tokens: For usage, where it lacks.
        """
        transcript = self.transcript
        events = b""
        if transcript.finish_reason is None:  # all the tokens it may have
            payload: dict[str, Any] = {"delta": {}} if self._terms.is_chat else {"text": ""}
            end = {"index": 0, **payload, "logprobs": None, "finish_reason": "length"}
            events += self._event({"choices": [end]})
        if self.lacks_usage:
            is_by_token = transcript.finish_reason == "stop" and transcript.stop_reason is None
            has_end = is_by_token and not self._terms.returns_ids  # a token without a text
            usage = _usage(num_prompt_tokens, num_text_tokens + has_end)
            events += self._event({"choices": [], "usage": usage})
        return events + (b"" if transcript.is_done else b"data: " + DONE + b"\n\n")

    def _event(self, fields: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._terms.is_chat else "text_completion"
        seen = self._transcript
        head = {"id": seen.id, "object": kind, "created": seen.created, "model": seen.model}
        return b"data: " + orjson.dumps(head | fields) + b"\n\n"

    # ---------------------------------------------------------------- another engine's events

    def _rewritten(self, events: bytes) -> bytes:
        return b"".join(self._rewrite(data) for data in data_of(events))

    def _rewrite(self, data: bytes) -> bytes:
        """Make an event of the engine of now one of the client's stream; b"": not for the client.

        Raises:
            NotContinued: it is no event of the answer that was asked for.
        """
        sent = self._transcript
        if data == DONE:
            sent.is_done = True
            return b"data: " + DONE + b"\n\n"
        try:
            chunk = orjson.loads(data)
            seen = msgspec.convert(chunk, Chunk)
        except (orjson.JSONDecodeError, msgspec.ValidationError, OverflowError) as exc:
            raise NotContinued("stream") from exc
        self._prove(seen)
        if seen.usage is not None:
            self.engine_usage = seen.usage
            chunk["usage"] = self._sum(seen.usage)
        if not seen.choices:
            if not self._terms.includes_usage:
                return b""
        elif sent.has_role and seen.choices[0].delta is not None:
            delta = chunk["choices"][0]["delta"]
            if delta.pop("role", None) is not None and not seen.choices[0].delta.content:
                return b""
        self._strip_ids(chunk, seen)
        sent.note(seen)
        if sent.unsound is not None:
            raise NotContinued(sent.unsound)
        if sent.id is not None:
            chunk |= {"id": sent.id, "created": sent.created, "model": sent.model}
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _prove(self, chunk: Chunk) -> None:
        """See that the engine goes on from the very prompt it was given, before it is believed.

        One that does not know the field would begin the answer again.
        """
        if self._is_proven:
            return
        ids = chunk.prompt_token_ids
        if ids is None and chunk.choices:
            ids = chunk.choices[0].prompt_token_ids
        if ids != self._sent_ids:
            raise NotContinued("proof")
        self._is_proven = True

    def _sum(self, usage: Usage) -> dict[str, Any]:
        """Count what all engines generated. What the first one had cached, it took with it."""
        num_generated = self._num_generated + (usage.completion_tokens or 0)
        return _usage(len(self._prompt_ids), num_generated)

    def _strip_ids(self, chunk: dict[str, Any], seen: Chunk) -> None:
        """Take out the ids that only this request asked for; the client has had its prompt's."""
        for part in (chunk, *chunk.get("choices", ())):
            if "prompt_token_ids" in part:
                part["prompt_token_ids"] = None
            if not self._terms.returns_ids and "token_ids" in part:
                part["token_ids"] = None
        seen.prompt_token_ids = None
        for choice in seen.choices:
            choice.prompt_token_ids = None
            if not self._terms.returns_ids:
                choice.token_ids = None


def _usage(num_prompt_tokens: int, num_generated_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_generated_tokens,
        "completion_tokens": num_generated_tokens,
    }
