"""Decide whether engines get a prompt's token ids: by model, kind of request and replica.

An engine that gets ids skips its own template and tokenizer, and computes those ids. Wrong ids give
another answer, and the engine's count of them proves nothing. So ids are sent only if all of these
are proven:

- The model's tokens: one prompt was encoded whole, and engines counted eight as we do.
- The kind of request: engines counted two of its prompts as we do. A kind is a route, tools and
  template arguments: everything that decides a prompt besides the messages.
- The replica: its release takes ids, and its process made our ids of sample texts and chats
  (`router.discovery.model_watch`). A release that is not known gets none.

One in 32 prompts still goes as text, so that its count is new evidence. Any sign of wrong ids
suspends the model at once, for a pause that doubles. Then everything is proven again. With
`tokens.hand_over: on`, model and kind need no proof. Replicas still do, and wrong ids still suspend
the model.

Source: vLLM 0.32.0, renderers/online_renderer.py:_reused_prompt_token_ids. A release that ignores
the ids makes them of the text, which does no harm. One that refuses them suspends the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import orjson
import xxhash

from router.api.openai import ChatRequest
from router.base.backoff import Suspension
from router.base.bounded import Bounded
from router.base.engines import V0_32, Release, is_at_least
from router.tokens.prompter import Prompters

logger = logging.getLogger(__name__)

Mode = Literal["auto", "on", "off"]

_SINCE: Final[Release] = V0_32  # engines take ids
_MIN_TOKENS: Final = 1024  # an engine makes fewer in about 2 ms; see docs/research/index.md
_MIN_AGREED: Final = 8
_MIN_OF_KIND: Final = 2
_MAX_KINDS: Final = 256  # of a model
_MAX_FAILED: Final = 3  # in a row
_AS_TEXT: Final = 32
_PAUSE_S: Final = (60.0, 3600.0)


class Kind(NamedTuple):
    """A kind of request: the engine makes their prompts in the same way."""

    path: str
    digest: int


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


class _Model:
    """The evidence for one model."""

    __slots__ = ("has_begun", "kinds", "num_agreed", "num_due", "num_failed", "suspension")

    def __init__(self) -> None:
        self.suspension = Suspension(*_PAUSE_S)
        self.num_due = 0
        self.reset()

    def reset(self) -> None:
        self.has_begun = False  # ids were handed over
        self.num_agreed = 0
        self.num_failed = 0
        self.kinds: Bounded[Kind, int] = Bounded(_MAX_KINDS)


class HandOver:
    """Decides about each prompt, by the evidence of requests and replicas.

    Args:
        on_suspended: Called with model and reason.
    """

    def __init__(
        self, mode: Mode, prompters: Prompters, *, on_suspended: Callable[[str, str], None]
    ) -> None:
        self._mode = mode
        self._prompters = prompters
        self._on_suspended = on_suspended
        self._models: dict[str, _Model] = {}

    def is_due(
        self,
        model: str,
        kind: Kind,
        replica: str,
        num_tokens: int,
        now_s: float,
        *,
        version: str | None,
    ) -> bool:
        """Return whether a prompt goes to a replica with its ids.

        `version`: the replica's; None: it is not known.
        """
        if self._mode == "off" or num_tokens < _MIN_TOKENS or not is_at_least(version, _SINCE):
            return False
        base = self._prompters.base(model)
        state = self._model(base)
        if self._mode != "on" and state.kinds.get(kind, 0) < _MIN_OF_KIND:
            return False
        if not self._is_proven(base, state, replica, now_s):
            return False
        state.num_due += 1
        is_due = state.num_due % _AS_TEXT != 0
        state.has_begun |= is_due
        return is_due

    def observe_match(self, model: str, kind: Kind) -> None:
        """Record that an engine tokenized a prompt's text itself, and counted it as we do."""
        if self._mode == "off":
            return
        state = self._model(self._prompters.base(model))
        state.num_agreed += 1
        state.kinds.put(kind, state.kinds.get(kind, 0) + 1)

    def observe_attempt(self, model: str, now_s: float, *, failed: bool) -> None:
        """Record whether a replica failed on ids; suspend after several failures in a row."""
        state = self._model(self._prompters.base(model))
        state.num_failed = state.num_failed + 1 if failed else 0
        if state.num_failed >= _MAX_FAILED:
            self.suspend(model, "failed", now_s)

    def suspend(self, model: str, reason: str, now_s: float) -> None:
        """Stop sending a model's ids for a while, and drop the evidence.

        Args:
            reason: `count`, `tokens`, `refused` or `failed`; a label of the metric.
        """
        base = self._prompters.base(model)
        state = self._model(base)
        has_begun = state.has_begun
        state.reset()
        if not has_begun:
            return
        pause_s = state.suspension.begin(now_s)
        self._on_suspended(base, reason)
        logger.error(
            "token ids are not sent for a while",
            extra={"model": base, "reason": reason, "seconds": pause_s},
        )

    def _is_proven(self, base: str, state: _Model, replica: str, now_s: float) -> bool:
        """Return whether a model's ids are the engines', and those of a replica's process."""
        prompter = self._prompters.get(base)
        if prompter is None or prompter.engine_only is not None or state.suspension.is_on(now_s):
            return False
        trust = prompter.trust
        if trust.disagrees(replica) or not trust.has_compared(replica):
            return False
        if self._mode == "on":
            return True
        return state.num_agreed >= _MIN_AGREED and trust.num_proofs > 0

    def _model(self, base: str) -> _Model:
        state = self._models.get(base)
        if state is None:
            state = self._models[base] = _Model()
        return state
