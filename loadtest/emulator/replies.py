"""The replies of a model without weights: the same prompt and seed get the same reply.

Words are tokens that encode to one id and back. So a reply sent back in the next turn has the same
tokens, unless the template changes it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash
from msgspec import Struct

from loadtest.emulator.tokens import ChatTokenizer

_MAX_WORDS = 1024
_MAX_CANDIDATES = 16_384


class ToolCall(Struct, frozen=True):
    """One call; `arguments` is JSON text. The text before token `start` is its name's."""

    id: str
    name: str
    arguments: str
    start: int


class Reply(Struct, frozen=True, kw_only=True):
    """Tokens and their texts, shape (num_tokens,); an end-of-sequence token has the text ''.

    finish_reason: `stop`, `length`, `tool_calls` or `abort`. stop_reason: the stop string that
    ended it.
    """

    ids: list[int]
    texts: list[str]
    finish_reason: str
    stop_reason: str | None = None
    tool_call: ToolCall | None = None

    def aborted(self, num_tokens: int) -> Reply:
        """Return the beginning of a reply that its engine gives up."""
        ids, texts = self.ids[:num_tokens], self.texts[:num_tokens]
        return Reply(ids=ids, texts=texts, finish_reason="abort")

    def text(self, start: int = 0, stop: int | None = None) -> str:
        """Join the texts of tokens [start, stop); '' where the reply is a tool call."""
        return "" if self.tool_call is not None else "".join(self.texts[start:stop])

    def arguments(self, start: int = 0, stop: int | None = None) -> str:
        """Return the part of the tool call's arguments that tokens [start, stop) say."""
        assert self.tool_call is not None
        end = len(self.ids) if stop is None else stop
        return self.tool_call.arguments[self._num_known(start) : self._num_known(end)]

    def _num_known(self, num_tokens: int) -> int:
        """Count the characters of the tool call's arguments known after `num_tokens`."""
        assert self.tool_call is not None
        call, num_left = self.tool_call, len(self.ids) - self.tool_call.start
        if num_tokens >= len(self.ids) - (self.finish_reason == "tool_calls"):
            return len(call.arguments)
        return len(call.arguments) * max(num_tokens - call.start, 0) // max(num_left, 1)


class ReplyRules(Struct, frozen=True, kw_only=True):
    """The length of a reply."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    natural_tokens: int = 128


class ReplyWriter:
    """Writes replies for one model."""

    __slots__ = ("_eos_id", "_seed", "_tokenizer", "_words")

    def __init__(self, tokenizer: ChatTokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._eos_id = tokenizer.eos_id
        self._seed = seed
        self._words = _find_words(tokenizer)

    def dice(self, prompt_ids: Sequence[int], request_seed: int | None) -> random.Random:
        """Make the random source of one request: prompt's tail, its length and the seeds."""
        tail = repr((self._seed, request_seed, len(prompt_ids), prompt_ids[-64:]))
        return random.Random(xxhash.xxh3_64_intdigest(tail.encode()))

    def words(self, dice: random.Random, rules: ReplyRules) -> Reply:
        """Write words up to the natural length or `max_tokens`."""
        natural = max(rules.min_tokens, 1, rules.natural_tokens)
        ends = natural < rules.max_tokens and not rules.ignore_eos
        count = natural if ends else rules.max_tokens
        words = self._words
        at, stride = dice.randrange(len(words)), dice.randrange(len(words)) | 1
        picked = [words[(at + i * stride) % len(words)] for i in range(count)]
        return self._finish([id for id, _ in picked], [text for _, text in picked], ends, rules)

    def echo(self, text: str, rules: ReplyRules) -> Reply:
        """Repeat the text, token by token, up to `max_tokens`."""
        ids = self._tokenizer.encode(text).ids if text else []
        ends = len(ids) < rules.max_tokens and not rules.ignore_eos
        if not ids or (not ends and len(ids) < rules.max_tokens):
            repeated = ids or [self._words[0][0]]
            ids = (repeated * (rules.max_tokens // len(repeated) + 1))[: rules.max_tokens]
            ends = False
        ids = ids[: rules.max_tokens]
        return self._finish(ids, self._texts(ids), ends, rules)

    def tool_call(self, dice: random.Random, name: str, given: Any, rules: ReplyRules) -> Reply:
        """Call a function, in the Hermes form."""
        arguments = msgspec.json.encode(given).decode()
        head = '<tool_call>\n{"name": ' + msgspec.json.encode(name).decode() + ', "arguments": '
        head_ids = self._tokenizer.encode(head).ids
        body_ids = self._tokenizer.encode(arguments + "}\n</tool_call>").ids
        ids = [*head_ids, *body_ids, self._eos_id]
        cut = len(ids) > rules.max_tokens
        ids = ids[: rules.max_tokens]
        return Reply(
            ids=ids,
            texts=[""] * len(ids),
            finish_reason="length" if cut else "tool_calls",
            tool_call=ToolCall(
                id=f"chatcmpl-tool-{dice.getrandbits(64):016x}",
                name=name,
                arguments=arguments,
                start=min(len(head_ids), len(ids)),
            ),
        )

    def _finish(self, ids: list[int], texts: list[str], ends: bool, rules: ReplyRules) -> Reply:
        """End a reply: by a stop string, an end-of-sequence token, or its length."""
        found = _first_stop(texts, rules.stop)
        if found is not None:
            count, kept, stop = found
            return Reply(
                ids=ids[:count],
                texts=[*texts[: count - 1], kept],
                finish_reason="stop",
                stop_reason=stop,
            )
        if ends:
            return Reply(ids=[*ids, self._eos_id], texts=[*texts, ""], finish_reason="stop")
        return Reply(ids=ids, texts=texts, finish_reason="length")

    def _texts(self, ids: list[int]) -> list[str]:
        """Cut a text into what each token adds to it; incomplete characters come with the last."""
        texts: list[str] = []
        start = 0
        for stop in range(1, len(ids) + 1):
            text = self._tokenizer.decode(ids[start:stop])
            if text.endswith("\ufffd") and stop < len(ids):
                texts.append("")
            else:
                texts.append(text)
                start = stop
        return texts


def _find_words(tokenizer: ChatTokenizer) -> list[tuple[int, str]]:
    """List tokens that are a space and a word, and nothing else, in both directions."""
    words: list[tuple[int, str]] = []
    any_text: list[tuple[int, str]] = []
    for id in range(min(tokenizer.vocab_size, _MAX_CANDIDATES)):
        text = tokenizer.decode([id])
        if text.isascii() and text.strip().isalpha():
            any_text.append((id, text))
            if text[0] == " " and len(text) > 2 and tokenizer.encode_plain(text) == [id]:
                words.append((id, text))
                if len(words) == _MAX_WORDS:
                    break
    return words or any_text or [(0, "x")]


def _first_stop(texts: list[str], stops: Sequence[str]) -> tuple[int, str, str] | None:
    """Find the first stop string: tokens up to it, what is left of the last one's text, which."""
    if not stops:
        return None
    whole = "".join(texts)
    hits = [(at, stop) for stop in stops if stop and (at := whole.find(stop)) >= 0]
    if not hits:
        return None
    at, stop = min(hits)
    before = 0
    for count, text in enumerate(texts, 1):
        if before + len(text) >= at + len(stop):
            return count, whole[before : max(at, before)], stop
        before += len(text)
    raise AssertionError("a stop string that was found ends in some token")


def sample(schema: Any, dice: random.Random) -> Any:
    """Make a value for a JSON schema: the first of an enum, else something of its type."""
    if not isinstance(schema, Mapping):
        return {}
    if schema.get("enum"):
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "object":
            properties = schema.get("properties")
            properties = properties if isinstance(properties, Mapping) else {}
            names = schema.get("required") or list(properties)
            return {name: sample(properties.get(name), dice) for name in names}
        case "array":
            return [sample(schema.get("items"), dice)]
        case "integer" | "number":
            return dice.randrange(100)
        case "boolean":
            return dice.random() < 0.5
        case "null":
            return None
        case _:
            return f"value-{dice.randrange(10_000)}"
