"""What text comes to: token counts and prefix ids, for engines that are only modelled.

A message counts as ChatML with its tool calls as JSON, a request's tools as JSON in front. Real
templates differ by a few tokens a message. A real engine is sent the messages themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash
from tokenizers import Tokenizer

from loadtest.tiny_model import MODEL_DIR
from loadtest.traces.errors import WorkloadError

_SHOWN: Final = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Load a tokenizer.json, or the one in a model directory; None: the bundled model's.

    Raises:
        WorkloadError: There is none, or it is broken.
    """
    path = path or MODEL_DIR
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise WorkloadError(f"{file}: no such file; a tokenizer.json is needed, or its directory")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise WorkloadError(f"{file}: not a tokenizer: {error}") from error


class Blocks:
    """Tokenizes messages, each different one once, and names the prefixes of prompts."""

    __slots__ = ("_decoder", "_encoder", "_ids", "_messages", "_tokenizer", "block_size")

    def __init__(self, tokenizer: Tokenizer, block_size: int) -> None:
        self.block_size = block_size
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder(order="deterministic")
        self._ids: dict[int, int] = {}  # digest of a prefix: its number
        self._messages: dict[int, tuple[dict[str, Any], array[int]]] = {}  # by digest

    def read(self, message: dict[str, Any]) -> tuple[dict[str, Any], array[int]]:
        """Tokenize a message; an equal one is given back as the same object, to save memory."""
        digest = xxhash.xxh3_128_intdigest(self._encoder.encode(message))
        known = self._messages.get(digest)
        if known is None:
            known = self._messages[digest] = message, self._encode(message)
        return known

    def tools(self, tools: Sequence[Mapping[str, Any]] | None) -> array[int]:
        """Tokenize a request's tool definitions."""
        text = self._encoder.encode(tools).decode() if tools else ""
        return array("I", self._tokens(text))

    def count(self, text: str) -> int:
        """Count the tokens of a reply."""
        return len(self._tokens(text))

    def name(self, parts: Iterable[array[int]]) -> tuple[int, tuple[int, ...]]:
        """Join a prompt.

        Returns:
            Its number of tokens, and an id for each prefix of `block_size`, the last one partial.
        """
        prompt = array("I")
        for part in parts:
            prompt += part
        prompt += self._opening("assistant")
        data, step = memoryview(prompt).cast("B"), self.block_size * prompt.itemsize
        digest, ids = 0, []
        for start in range(0, len(data), step):
            block = xxhash.xxh3_64(digest.to_bytes(8, "little"))
            block.update(data[start : start + step])
            digest = block.intdigest()
            ids.append(self._ids.setdefault(digest, len(self._ids)))
        return len(prompt), tuple(ids)

    def _encode(self, message: Mapping[str, Any]) -> array[int]:
        tokens = self._opening(str(message.get("role", "")))
        for key in _SHOWN[1:]:
            value = message.get(key)
            if value:
                text = value if isinstance(value, str) else self._encoder.encode(value).decode()
                tokens += array("I", self._tokens(text))
        return tokens + array("I", self._tokens("<|im_end|>\n"))

    def _opening(self, role: str) -> array[int]:
        return array("I", self._tokens(f"<|im_start|>{role}\n"))

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
