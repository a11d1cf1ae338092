"""One request and its streamed answer: bytes in, a `TurnResult` out.

An exchange reads the event stream of the chat and completions APIs. It has no sockets and no clock;
`now_s` is an argument.

    first token   the first event that carries one. A chat stream opens with an event that names
                  the role only; it counts only where no event ever carries text.
    gaps          between events that carry tokens. Tokens that come with others have a gap of
                  zero, so an engine that bundles tokens does not have fewer gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from loadtest.results import Predicted, TurnResult, parse_predicted

_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_MAX_MESSAGE: Final = 300
_TAIL_SHARE: Final = 10  # the longest tenth
_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class Exchange:
    """One exchange. Call `begin`, then `refuse` or `receive` … `close`, then `result`.

    Args:
        start_s: When the request was sent, on the caller's clock.
        due_s: When it should have been (open loop): times count from there. None: from `start_s`.
        late_s: How late the sender was.
        keep_text: Keep the reply's text, for conversations that go on with it.
        secret: Removed from error messages (an API key that a server may repeat).
    """

    __slots__ = ("_errors", "_events_seen", "_headers", "_is_done", "_origin_s", "_rest", "_secret",
                 "_sent", "_text", "_times", "_usage", "status")  # fmt: skip

    def __init__(
        self,
        session_id: str,
        number: int,
        *,
        start_s: float,
        due_s: float | None = None,
        late_s: float = 0.0,
        keep_text: bool = False,
        secret: str | None = None,
    ) -> None:
        self.status: int | None = None
        self._sent = {
            "session_id": session_id,
            "number": number,
            "start_s": start_s,
            "due_s": due_s,
            "late_s": late_s,
        }
        self._origin_s = start_s if due_s is None else due_s
        self._secret = secret
        self._text: list[str] | None = [] if keep_text else None
        self._headers: dict[str, Any] = {}
        self._errors: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._rest = b""
        self._events_seen = 0
        self._is_done = False
        self._times = _Times()

    @property
    def reply(self) -> str:
        """Join what the model said so far; empty unless `keep_text`."""
        return "".join(self._text or ())

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Record the answer's head; `headers` is case-insensitive."""
        self.status = status
        self._headers = {
            "replica": headers.get("x-warmroute-replica"),
            "predicted": _predicted(headers.get("x-warmroute-cached")),
            "policy": headers.get("x-warmroute-policy"),
            "arm": headers.get("x-warmroute-variant"),
            "request_id": headers.get("x-warmroute-request-id"),
            "router_ms": _number(headers.get("x-warmroute-ms")),
        }

    def refuse(self, body: bytes) -> None:
        """Record the body of an answer whose status is not 200."""
        self.fail(f"http_{self.status}", error_text(body))

    def fail(self, kind: str, message: str) -> None:
        """Record an error; later errors are ignored."""
        if self._errors:
            return
        if self._secret:
            message = message.replace(self._secret, "***")
        self._errors = {"error": kind, "error_message": message[:_MAX_MESSAGE]}

    def receive(self, data: bytes, now_s: float) -> None:
        """Read the next piece of the stream; it may be cut anywhere."""
        *lines, rest = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)
        if len(rest) > _MAX_LINE_BYTES:
            self._rest = b""
            self.fail("garbage", f"a line of the stream is over {_MAX_LINE_BYTES} bytes long")

    def close(self) -> None:
        """End the stream."""
        if self._is_done or self._errors:
            return
        if self._rest and not self._events_seen:
            self.fail("garbage", "the answer is no event stream")
        else:
            self.fail("broken", "the stream ended without [DONE]")

    def result(self, now_s: float) -> TurnResult:
        """Return what was measured; the answer ended at `now_s`."""
        first_s = self._times.first_s
        mean_s, tail_s = self._times.between_tokens(self._usage.get("num_output_tokens"))
        return TurnResult(
            total_s=now_s - self._origin_s,
            ttft_s=None if first_s is None else first_s - self._origin_s,
            status=self.status,
            tbt_mean_s=mean_s,
            tbt_tail_s=tail_s,
            **self._sent,  # type: ignore[arg-type]
            **self._headers,
            **self._usage,
            **self._errors,
        )

    def _take(self, data: bytes, now_s: float) -> None:
        """Read one event."""
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            self.fail("garbage", "an event of the stream is not a JSON object")
            return
        self._events_seen += 1
        if "error" in event:
            self.fail("stream", error_text(data))
        choices = event.get("choices")
        if choices and isinstance(choices, list) and isinstance(choices[0], dict):
            self._take_choice(choices[0], now_s)
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._count(usage)

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):  # chat
            text = delta.get("content")
            has_token = bool(text) or any(delta.get(name) for name in _TEXT_FIELDS)
        else:  # completions: a token may have no text, the event that only ends has none either
            text = choice.get("text")
            has_token = bool(text) or choice.get("finish_reason") is None
        if self._text is not None and isinstance(text, str):
            self._text.append(text)
        self._times.event(now_s, has_token=has_token)

    def _count(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details")
        details = details if isinstance(details, dict) else {}
        counts = {
            "num_prompt_tokens": usage.get("prompt_tokens"),
            "num_output_tokens": usage.get("completion_tokens"),
            "num_cached_tokens": details.get("cached_tokens"),
        }
        self._usage = {k: v if isinstance(v, int) else None for k, v in counts.items()}


class _Times:
    """When the events of one answer came, in seconds of the caller's clock."""

    __slots__ = ("_first_event_s", "_first_token_s", "_gaps", "_last_token_s")

    def __init__(self) -> None:
        self._first_event_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._gaps: list[float] = []

    @property
    def first_s(self) -> float | None:
        """Return when the first token came, or else the first event; None: nothing came."""
        return self._first_event_s if self._first_token_s is None else self._first_token_s

    def event(self, now_s: float, *, has_token: bool) -> None:
        """Record an event."""
        if self._first_event_s is None:
            self._first_event_s = now_s
        if not has_token:
            return
        if self._first_token_s is None:
            self._first_token_s = now_s
        else:
            self._gaps.append(now_s - self._last_token_s)
        self._last_token_s = now_s

    def between_tokens(self, num_tokens: int | None) -> tuple[float | None, float | None]:
        """Return the mean of the gaps, and the mean of the longest tenth (at least one)."""
        if not self._gaps:
            return None, None
        num_gaps = max(len(self._gaps), (num_tokens or 0) - 1)
        num_longest = -(-num_gaps // _TAIL_SHARE)
        longest = sorted(self._gaps, reverse=True)[:num_longest]
        return sum(self._gaps) / num_gaps, sum(longest) / num_longest


def error_text(body: bytes) -> str:
    """Return the message of an error answer, without quotes of the request.

    Known shapes: `{"error": {"message": …}}`, `{"error": "…"}`, `{"message": …}`,
    `{"detail": …}`; anything else is shown as it is if it is short.
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body[:_MAX_MESSAGE].decode(errors="replace")
        return " ".join(text.split())
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    text = found if isinstance(found, str) else orjson.dumps(found).decode()
    # vLLM's validation errors quote the prompt, which does not belong in a file of results.
    for quote in ("'input':", '"input":'):
        text = text.partition(quote)[0]
    return " ".join(text.split())[:_MAX_MESSAGE]


def _predicted(header: str | None) -> Predicted | None:
    try:
        return parse_predicted(header)
    except msgspec.ValidationError:
        return None


def _number(header: str | None) -> float | None:
    try:
        return float(header) if header else None
    except ValueError:
        return None
