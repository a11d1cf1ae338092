"""A prompt's token ids in the body that its engine gets: `kv_transfer_params.prompt_token_ids`.

What must live here: which requests can have them, and the bytes. What must not: which ones do
(router.tokens.hand_over). The field is put behind all others; nothing else of the body changes.
Source: vLLM 0.32.0, renderers/online_renderer.py: it ignores the ids where `echo` is asked for or
messages have media; tool and reasoning parsers, logprobs and salts work as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final

import orjson
import xxhash

from router.api.openai import ChatRequest
from router.metrics import Metrics
from router.request.plan import Placement
from router.request.results import Prompt, Tries
from router.request.tokenize import MaxTokens
from router.tokens.hand_over import HandOver, Kind
from router.upstream import Answer

_FIELD: Final = b"prompt_token_ids"
_SPACE: Final = b" \t\r\n"


class Handing:
    """Hands prompts over as ids, and notices where that was wrong.

    Args:
        max_tokens: What is too long goes as text: the engine has other words for it.
    """

    def __init__(self, hand_over: HandOver, *, max_tokens: MaxTokens, metrics: Metrics) -> None:
        self._hand_over = hand_over
        self._max_tokens = max_tokens
        self._metrics = metrics

    async def body_with_ids(
        self, prompt: Prompt, tries: Tries, placement: Placement
    ) -> bytes | None:
        """Return a request's body with its token ids. None: it goes as it came.

        80,000 ids take 0.2 ms, where none was written before 0.6.
        """
        kind, tokens, model = prompt.read.kind, prompt.tokens, prompt.model or ""
        if kind is None or prompt.way != "local" or tokens is None or tries.records:
            return None  # after a failure it goes as it came
        longest = self._max_tokens(model)
        if longest is not None and prompt.num_tokens > longest:
            return None
        if not self._hand_over.is_due(
            model, kind, placement.replica, prompt.num_tokens, monotonic()
        ):
            return None
        steps = tokens.json()
        try:
            while True:
                next(steps)
                await asyncio.sleep(0)
        except StopIteration as end:
            ids: bytes = end.value
        body = with_ids(prompt.inbound.body or b"", ids)
        if body is not None:
            self._metrics.handed_over.labels(model).inc()
        return body

    def is_refused(self, prompt: Prompt, answer: Answer) -> bool:
        """Return whether an engine refused the ids: the request is to be sent without them.

        Also records whether it failed on them.
        """
        model, now_s = prompt.model or "", monotonic()
        if answer.outcome_status == 400 and _FIELD in answer.readable:
            self._hand_over.suspend(model, "refused", now_s)
            return True
        self._hand_over.observe_attempt(model, now_s, failed=answer.outcome_status == 500)
        return False


def with_ids(body: bytes, ids: bytes) -> bytes | None:
    """Add the ids, in JSON, to a JSON object that has other members; None: it is none."""
    end = len(body.rstrip(_SPACE)) - 1
    if body[end : end + 1] != b"}":
        return None
    return b"".join((body[:end], b',"kv_transfer_params":{"prompt_token_ids":[', ids, b"]}}"))


def kind_of(path: str, chat: ChatRequest, body: Mapping[str, Any]) -> Kind | None:
    """Return what decides a chat's prompt besides its messages; None: it is not handed over."""
    if chat.engine_only is not None or body.get("echo") or "kv_transfer_params" in body:
        return None
    choice = chat.tool_choice
    try:
        said = orjson.dumps(
            [
                bool(chat.tools),
                choice if isinstance(choice, str) else choice is not None,
                bool(chat.documents),
                chat.reasoning_effort,
                chat.add_generation_prompt,
                chat.continue_final_message,
                chat.add_special_tokens,
                chat.chat_template,
                chat.chat_template_kwargs,
                body.get("thinking"),
            ],
            option=orjson.OPT_SORT_KEYS,
        )
    except orjson.JSONEncodeError:  # nested deeper than it writes, or no Unicode
        return None
    return Kind(path, xxhash.xxh3_64_intdigest(said))
