"""Whether a replica computes the token ids that it is handed: three tiny requests show it.

    1  a chat as text, with everything that tokenizers split differently: the engine must make the
       same ids as we do
    2  the same text with one id less, 3 with three more: the engine must count these ids, not the
       text's

A version string would prove nothing: releases are patched, front ends are replaced.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from msgspec import Struct

from router.api.openai import parse_chat
from router.base.decoding import decoder
from router.base.errors import UpstreamBroken
from router.discovery.engine_api import EngineApi
from router.tokens import Prompter
from router.tokens.id_probe import ALL_TEXTS, Difference, of_chat

_MESSAGES: Final = [
    {"role": "user", "content": ALL_TEXTS},
    {"role": "assistant", "content": "Its title."},
    {"role": "user", "content": "And on the second one?"},
]
_CHAT: Final = "/v1/chat/completions"
_ONE_TOKEN: Final[dict[str, dict[str, Any]]] = {
    _CHAT: {"messages": _MESSAGES, "max_tokens": 1, "temperature": 0},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 1, "temperature": 0},
    "/v1/responses": {"input": _MESSAGES, "max_output_tokens": 1, "temperature": 0, "store": False},
}
_TIMEOUT_S: Final = 60.0  # it may wait behind long prompts


class WrongIds(Exception):
    """An engine makes other tokens of a text than we do."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.what)
        self.difference = difference


class _PromptUsage(Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None  # Messages: not among its input_tokens,
    cache_creation_input_tokens: int | None = None  # nor are these


class _ProbeAnswer(Struct):
    usage: _PromptUsage | None = None
    prompt_token_ids: list[int] | None = None


_decode = decoder(_ProbeAnswer, "json")


async def takes_ids(
    api: EngineApi, replica: str, url: str, *, model: str, path: str, prompter: Prompter
) -> bool:
    """Ask a replica.

    Raises:
        WrongIds: its ids of a text are not ours.
        UpstreamError: it did not answer, or with an error of its own: ask again later.
        NeedsEngine, RouterError: we cannot make the text's ids any more.
    """
    if path not in _ONE_TOKEN:
        return False
    plan = prompter.plan_chat(parse_chat({"model": model, "messages": _MESSAGES}))
    ours = prompter.commit(plan, plan.encode()).ids()
    text = await _ask(api, replica, url, _CHAT, {"model": model, "return_token_ids": True})
    if text is None or text.prompt_token_ids is None:
        return False
    if text.prompt_token_ids != ours:
        raise WrongIds(of_chat(text.prompt_token_ids, ours))
    for ids in (ours[:-1], ours + ours[-3:]):
        fields = {"model": model, "kv_transfer_params": {"prompt_token_ids": ids}}
        answer = await _ask(api, replica, url, path, fields)
        if answer is None or _num_tokens(answer) != len(ids):
            return False
    return True


async def _ask(
    api: EngineApi, replica: str, url: str, path: str, fields: dict[str, Any]
) -> _ProbeAnswer | None:
    """Send a request for one token; None: the replica refuses it."""
    body = orjson.dumps(_ONE_TOKEN[path] | fields)
    answer = await api.order(
        replica, url + path, method="POST", query={}, body=body, timeout_s=_TIMEOUT_S
    )
    if answer.status >= 500 or answer.status == 429:
        raise UpstreamBroken(replica, f"{path} answered {answer.status}")
    if answer.status != 200:
        return None
    try:
        return _decode(answer.body)
    except ValueError:
        return None


def _num_tokens(answer: _ProbeAnswer) -> int | None:
    usage = answer.usage
    if usage is None:
        return None
    if usage.prompt_tokens is not None:
        return usage.prompt_tokens
    if usage.input_tokens is None:
        return None
    num_elsewhere = usage.cache_read_input_tokens or 0
    return usage.input_tokens + num_elsewhere + (usage.cache_creation_input_tokens or 0)
