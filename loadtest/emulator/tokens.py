"""Turn messages into token ids and block digests, as the engine does, once per prefix.

Text can be split at special tokens without changing its ids. So the ids and digests of each prefix
that ends at one are kept, and a turn costs only its new text. The text of a tokenizer that cannot
be split is tokenized whole.

Source of the message rules: vllm/renderers/chat_utils.py, 0.32.0 (string content format).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import xxhash
from tokenizers import Tokenizer as Backend

from router.base.contracts import NO_EXTRA, ExtraKeys, HashContract
from router.base.errors import BadRequest, TemplateFailed

_MAX_KNOWN_TOKENS = 4_000_000  # ids are shared ints: 8 bytes each, 32 MB


class Segment:
    """The tokens between two boundaries; `digests` of the blocks that end in it, by extra keys."""

    __slots__ = ("digests", "end", "ids", "key")

    def __init__(self, key: bytes, ids: list[int], end: int) -> None:
        self.key = key
        self.ids = ids
        self.end = end  # tokens from the prompt's start to the segment's end
        self.digests: dict[tuple[HashContract, ExtraKeys], list[bytes]] = {}


class Prompt:
    """An encoded prompt: all its ids, and the segments that remember its digests."""

    __slots__ = ("ids", "segments")

    def __init__(self, ids: list[int], segments: Sequence[Segment] = ()) -> None:
        self.ids = ids
        self.segments = segments


class EncodePlan:
    """A prompt to encode: `encode` may run in a thread, `ChatTokenizer.commit` ends it.

    `num_new_chars` counts the characters to tokenize.
    """

    __slots__ = ("_backend", "encoded", "known", "missing", "num_new_chars")

    def __init__(
        self, backend: Backend, known: list[Segment], missing: list[tuple[bytes, str]]
    ) -> None:
        self._backend = backend
        self.known = known
        self.missing = missing
        self.num_new_chars = sum(len(text) for _, text in missing)
        self.encoded: list[list[int]] = []

    def encode(self) -> None:
        """Tokenize the missing parts; changes nothing shared."""
        self.encoded = [
            self._backend.encode(text, add_special_tokens=False).ids for _, text in self.missing
        ]


class ChatTokenizer:
    """Template, tokenizer and memory of one model directory.

    Raises:
        OSError: The directory has no tokenizer.
    """

    __slots__ = ("_backend", "_ints", "_known", "_markers", "_max_known_tokens",
                 "_num_known_tokens", "tokenizer")  # fmt: skip

    def __init__(self, model_dir: Path, *, max_known_tokens: int = _MAX_KNOWN_TOKENS) -> None:
        self.tokenizer, self._markers = _load(model_dir, _stamps(model_dir))
        self._backend: Backend = self.tokenizer.backend_tokenizer
        self._ints = list(range(len(self.tokenizer)))
        self._known: OrderedDict[bytes, Segment] = OrderedDict()
        self._num_known_tokens = 0
        self._max_known_tokens = max_known_tokens

    def forget(self) -> None:
        """Tokenize all that comes from now on."""
        self._known.clear()
        self._num_known_tokens = 0

    @property
    def vocab_size(self) -> int:
        return len(self._ints)

    @property
    def eos_id(self) -> int:
        eos = self.tokenizer.eos_token_id
        return 0 if eos is None else int(eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Turn a conversation into the model's text.

        Raises:
            BadRequest: No messages, or a message that cannot be rendered as text.
            TemplateFailed: The template refused them.
        """
        if not messages:
            raise BadRequest(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [as_template_message(message) for message in messages],
                tools=[as_template_tool(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                **(kwargs or {}),
            )
        except (jinja2.TemplateError, ValueError, TypeError) as exc:
            raise TemplateFailed(str(exc)) from exc
        assert isinstance(text, str)
        return text

    def plan(self, text: str) -> EncodePlan:
        """Find the parts of a text that are not known yet."""
        known: list[Segment] = []
        missing: list[tuple[bytes, str]] = []
        key = b""
        for part in self._split(text):
            key = xxhash.xxh3_128_digest(key + part.encode())
            segment = None if missing else self._known.get(key)
            if segment is None:
                missing.append((key, part))
            else:
                self._known.move_to_end(key)
                known.append(segment)
        return EncodePlan(self._backend, known, missing)

    def commit(self, plan: EncodePlan) -> Prompt:
        """Remember the new parts and join the prompt."""
        segments = plan.known
        ints = self._ints
        end = segments[-1].end if segments else 0
        for (key, _), ids in zip(plan.missing, plan.encoded, strict=True):
            end += len(ids)
            segment = Segment(key, [ints[i] for i in ids], end)
            segments.append(segment)
            self._remember(segment)
        all_ids: list[int] = []
        for segment in segments:
            all_ids += segment.ids
        return Prompt(all_ids, segments)

    def encode(self, text: str) -> Prompt:
        """Encode a text now, without the tokenizer's own special tokens around it."""
        plan = self.plan(text)
        plan.encode()
        return self.commit(plan)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text without using or filling the memory."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def special_prefix(self) -> list[int]:
        """Return the ids the tokenizer puts before a plain text (BOS, usually none)."""
        ids: list[int] = self._backend.encode("", add_special_tokens=True).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(i) or "" for i in ids]

    def _split(self, text: str) -> list[str]:
        """Cut a text before every marker; one piece if the tokenizer cannot be split."""
        cuts = {0, len(text)}
        for marker in self._markers:
            at = text.find(marker)
            while at >= 0:
                cuts.add(at)
                at = text.find(marker, at + len(marker))
        ordered = sorted(cuts)
        return [text[a:b] for a, b in pairwise(ordered)]

    def _remember(self, segment: Segment) -> None:
        previous = self._known.pop(segment.key, None)
        if previous is not None:
            self._num_known_tokens -= len(previous.ids)
        self._known[segment.key] = segment
        self._num_known_tokens += len(segment.ids)
        while self._num_known_tokens > self._max_known_tokens:
            _, oldest = self._known.popitem(last=False)
            self._num_known_tokens -= len(oldest.ids)


def chain(prompt: Prompt, contract: HashContract, extra: ExtraKeys = NO_EXTRA) -> list[bytes]:
    """Name the prompt's full blocks, shape (num_blocks(num_tokens),), first block first."""
    digests: list[bytes] = []
    for segment in prompt.segments:
        known = segment.digests.get((contract, extra))
        if known is None:
            known = _digests(prompt.ids, segment.end, digests, contract, extra)
            segment.digests[contract, extra] = known
        digests += known
    if not prompt.segments:
        digests = _digests(prompt.ids, len(prompt.ids), [], contract, extra)
    return digests


def _digests(
    ids: list[int], end: int, before: list[bytes], contract: HashContract, extra: ExtraKeys
) -> list[bytes]:
    size, hashed = contract.block_size, contract.block_size + contract.lookahead
    parent = before[-1] if before else None
    digests: list[bytes] = []
    for start in range(len(before) * size, end - hashed + 1, size):
        _, parent = contract.extend(parent, ids[start : start + hashed], extra)
        assert parent is not None
        digests.append(parent)
    return digests


def as_template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Shape one message as vLLM hands it to a template.

    Raises:
        BadRequest: Not an object with a role, or with parts that are not text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest("each message must be an object with a role", param="messages")
    role = message["role"]
    shaped: dict[str, Any] = {"role": role, "content": _text(message.get("content"))}
    if role == "assistant":
        if message.get("tool_calls"):
            shaped["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
        if message.get("reasoning") is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        shaped["name"] = message["name"]
    return shaped


def as_template_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Shape one tool as vLLM's request model dumps it: known fields first, in its order."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise BadRequest("each tool must be an object with a function", param="tools")
    function = dict(tool["function"])
    known = {key: function.pop(key, None) for key in ("name", "description", "parameters")}
    return {"type": tool.get("type", "function"), "function": known | function}


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest("message content must be text or a list of parts", param="messages")
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        for field in ("text", "refusal", "thinking"):
            if isinstance(part.get(field), str):
                return str(part[field])
    raise BadRequest("only text parts are supported here", param="messages")


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise BadRequest("assistant tool_calls entries must be objects.", param="tool_calls")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            arguments = None
    function["arguments"] = arguments if isinstance(arguments, Mapping) else {}
    return {**call, "function": function}


@lru_cache(maxsize=4)
def _load(model_dir: Path, _: object) -> tuple[Any, list[str]]:
    """Load a directory's tokenizer and find its markers: 90 ms, once for all replicas of a process.

    transformers is imported here, as it takes most of the time of `warmroute --help`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    return tokenizer, _markers(tokenizer.backend_tokenizer, tokenizer.chat_template or "")


def _stamps(model_dir: Path) -> tuple[object, ...]:
    """Return a value that changes when a file of the directory is written again."""
    stats = [(entry.name, entry.stat()) for entry in os.scandir(model_dir)]
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


def _markers(backend: Backend, template: str) -> list[str]:
    """Pick the special tokens before which a text can be cut without changing its ids.

    These are the tokens that the template writes. There are none if an added token strips its
    surroundings, or if a normalizer or a rule for the first word looks back over a boundary.
    """
    state = msgspec.json.decode(backend.to_str())
    added = state["added_tokens"]
    contents = [token["content"] for token in added]
    if state["normalizer"] is not None or _has_prefix_rule(state["pre_tokenizer"]):
        return []
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added):
        return []
    return [
        token["content"]
        for token in added
        if token["special"]
        and token["content"] in template
        and not any(token["content"] in other for other in contents if other != token["content"])
    ]


def _has_prefix_rule(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_has_prefix_rule(part) for part in pre_tokenizer["pretokenizers"])
    return pre_tokenizer["type"] == "Metaspace" or bool(pre_tokenizer.get("add_prefix_space"))
