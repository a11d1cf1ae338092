"""The prompt of a turn: a trace's own messages, or words and token ids made from its hash ids.

    api           turn with messages          turn without
    auto          its messages, as a chat     token ids, as a completion
    completions   token ids (of its blocks)   token ids
    chat          its messages                one user message of words

Token ids need no tokenizer: any ids of the model will do, because equal hash ids become equal
tokens. Words need the model's own tokenizer to give exactly as many tokens as the workload says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Protocol

from loadtest import text
from loadtest.runner.options import Api, ReplayError, ReplayOptions
from loadtest.traces.blocks import load_tokenizer
from loadtest.traces.errors import WorkloadError
from loadtest.workload import Turn, Workload

_IDS: Final = (1_000, 8_000)  # words in every vocabulary of 8,192 and more, special tokens in none


class Prompts(Protocol):
    """Makes the words or token ids of a turn; the same ones whenever it is asked."""

    def body(self, turn: Turn) -> dict[str, Any]:
        """Build the part of the request that holds the prompt: `messages`, or `prompt`.

        May be called in another thread, by one at a time.
        """
        ...


class WorkloadPrompts:
    """Makes prompts by the table above."""

    __slots__ = ("_api", "_made", "_salt")

    def __init__(self, made: text.Prompts, *, api: Api, salt: str) -> None:
        self._made = made
        self._api = api
        self._salt = salt

    def body(self, turn: Turn) -> dict[str, Any]:
        if turn.messages is not None and self._api != "completions":
            body: dict[str, Any] = {"messages": text.salted(turn.messages, self._salt)}
            return body if turn.tools is None else body | {"tools": turn.tools}
        if self._api == "chat":
            return {"messages": [{"role": "user", "content": self._made.text(turn)}]}
        return {"prompt": self._made.token_ids(turn)}


def make_prompts(workload: Workload, options: ReplayOptions) -> Prompts:
    """Choose what makes the prompts of a workload.

    Raises:
        ReplayError: the tokenizer cannot be read, or has no words that repeat exactly.
    """
    try:
        made = text.Prompts(_vocabulary(options), workload.block_size, salt=options.salt)
    except (WorkloadError, text.UnstableTokenizer, ValueError) as error:
        raise ReplayError(str(error)) from error
    return WorkloadPrompts(made, api=options.api, salt=options.salt)


def _vocabulary(options: ReplayOptions) -> text.Vocabulary:
    """Return the words of a tokenizer where words are needed or one is given, else plain ids."""
    if options.tokenizer is None and options.api != "chat":
        return text.of_range(*_IDS)
    path = None if options.tokenizer is None else Path(options.tokenizer)
    return text.of_tokenizer(load_tokenizer(path))
