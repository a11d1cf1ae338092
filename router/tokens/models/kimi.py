"""Kimi's tokenizers: token ids by tiktoken, as the code in the models' repositories makes them.

That code is read (`kimi_code`) and never executed. The class here takes the same arguments, so that
transformers treats it in the same way. A text is cut at the added tokens. Between two of them, a
long text is split as that code splits it.
Source: vLLM 0.32.0, tokenizers/hf.py; transformers 5.19, tokenization_python.py (tokenize);
moonshotai's tokenization_kimi.py (encode).
"""

from __future__ import annotations

import base64
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
import tiktoken
from transformers import PreTrainedTokenizer

from router.api.openai import TokenIds
from router.tokens.boundaries import Boundaries, TextCuts, find_boundaries
from router.tokens.conversation import JsonMemo
from router.tokens.encoder import PlainEncoder
from router.tokens.model_files import ModelFiles
from router.tokens.models.kimi_code import KimiCode, read_code
from router.tokens.models.kimi_tools import declare_tools, sort_keys
from router.tokens.models.modes import KIMI_CLASS
from router.tokens.needs_engine import NeedsEngine, is_failure
from router.tokens.prompt_tree import NewSegment
from router.tokens.prompter import Prompter
from router.tokens.templates import ChatRenderer

_MAX_FILE_BYTES: Final = 64 << 20  # tiktoken.model has 3 MB
_MAX_CHARS: Final = 400_000
_MAX_RUN: Final = 25_000
_RUNS: Final = re.compile(r"\s+|\S+")
_PLAIN: Final = re.compile("[!-~]+")


def load(files: ModelFiles, max_bytes: int) -> Prompter:
    """Load a model's tokenizer and templates; see `models`."""
    tokenizer, code = _load_tokenizer(files)
    templates = files.templates(tokenizer)
    arguments = KimiArguments(code)
    return Prompter(
        KimiEncoder(tokenizer, templates.hints()),
        ChatRenderer(templates.find, tokenizer.special_tokens_map, arguments, files.release),
        max_bytes=max_bytes,
    )


class KimiTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """A model's vocabulary, special tokens and templates, as its own class has them.

    Args:
        vocab_file: `tiktoken.model`.
        code: The facts about the class that the engine runs.
    """

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012 (transformers' own name)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str,
        code: KimiCode,
        bos_token: Any = "[BOS]",
        eos_token: Any = "[EOS]",
        unk_token: Any = None,
        pad_token: Any = None,
        additional_special_tokens: Any = None,
        added_tokens_decoder: dict[int, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        ranks = read_vocabulary(Path(vocab_file))
        added = {key: str(token) for key, token in (added_tokens_decoder or {}).items()}
        first = len(ranks)
        self.specials = {
            added.get(number, f"<|reserved_token_{number}|>"): number
            for number in range(first, first + code.num_special)
        }
        self.encoding = tiktoken.Encoding(
            name="kimi",
            pat_str=code.pattern,
            mergeable_ranks=ranks,
            special_tokens=self.specials,
        )
        self.longest = max(map(len, ranks), default=1)
        if additional_special_tokens is None:
            additional_special_tokens = list(code.special_defaults)
        if code.keeps_added:
            kwargs["added_tokens_decoder"] = added_tokens_decoder
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            pad_token=pad_token,
            additional_special_tokens=additional_special_tokens,
            **kwargs,
        )

    @property
    def vocab_size(self) -> int:
        return self.encoding.n_vocab

    def get_vocab(self) -> dict[str, int]:
        """Return the special tokens: no others are looked up by name."""
        return self.specials

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        raise NotImplementedError  # `KimiEncoder` does

    def _convert_token_to_id(self, token: str) -> int:
        return self.specials[token]

    def _convert_id_to_token(self, index: int) -> str:
        raise NotImplementedError


def _load_tokenizer(files: ModelFiles) -> tuple[KimiTokenizer, KimiCode]:
    """Load the tokenizer and read the code of its class.

    Raises:
        NeedsEngine: a file is missing or broken, or the code is not known here.
    """
    try:
        classes = files.tokenizer_config["auto_map"]
        named = classes["AutoTokenizer"] if isinstance(classes, dict) else classes
        slow, fast = named if isinstance(named, list) else (named, None)
        module, _, name = str(slow).partition(".")
        if fast is not None or name != KIMI_CLASS or "--" in module:
            raise NeedsEngine("model", "the tokenizer's class is another")
        code = read_code(files.path(f"{module}.py").read_text())
        return KimiTokenizer.from_pretrained(
            files.name,
            code=code,
            truncation_side="left",
            local_files_only=files.local_files_only,
        ), code
    except NeedsEngine:
        raise
    except BaseException as exc:  # whatever a broken or foreign model directory raises
        if not is_failure(exc):
            raise
        raise NeedsEngine("model", f"{type(exc).__name__}: {exc}") from exc


def read_vocabulary(path: Path) -> dict[bytes, int]:
    """Read `tiktoken.model`: one token in base64 and its rank per line.

    Raises:
        ValueError: it is malformed or too large.
        OSError: it cannot be read.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"{path.name} is too large")
    lines = [line.split() for line in path.read_bytes().splitlines() if line]
    return {base64.b64decode(token): int(rank) for token, rank in lines}


class KimiEncoder(PlainEncoder):
    """Encodes texts with tiktoken.

    Raises:
        NeedsEngine: some special tokens cannot be told apart in a text.
    """

    __slots__ = ("_apart", "_encoding", "_needles", "_specials", "_splits")

    def __init__(self, tokenizer: KimiTokenizer, hints: str = "") -> None:
        specials: dict[str, int] = tokenizer.specials
        # Source: vllm/tokenizers/hf.py at 0.32.0; the vocabulary is written a character a byte
        longest = max(tokenizer.longest, *map(len, specials))
        super().__init__(longest, array("I"), array("I"))
        splitting = set(tokenizer.added_tokens_encoder)
        found = _boundaries(tokenizer, splitting, hints)
        self._encoding = tokenizer.encoding
        self._specials = set(specials)
        self._needles = found.needles
        self._apart = found.apart & splitting
        self._splits = re.compile("|".join(map(re.escape, splitting)) or "(?!)")

    def token_apart(self, token_id: int) -> str | None:
        try:
            token = self._encoding.decode_single_token_bytes(token_id).decode()
        except (KeyError, UnicodeDecodeError):
            return None
        return token if token in self._apart else None

    def cuts(self, data: bytes) -> TextCuts:
        return TextCuts(data, self._needles)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        return [self._encode(data[segment.start : segment.end].decode()) for segment in new]

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        return self._encode(text)

    def _encode(self, text: str) -> TokenIds:
        ids: TokenIds = array("I")
        try:
            for piece in self._pieces(text):
                ids.extend(
                    self._encoding.encode(
                        piece, allowed_special=self._specials, disallowed_special=()
                    )
                )
        except BaseException as exc:  # its expressions have a limit, and one may panic
            if not is_failure(exc):
                raise
            raise NeedsEngine("encoder", f"tiktoken: {type(exc).__name__}") from exc
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """Split a text where the engine encodes the rest on its own."""
        if len(text) <= _MAX_RUN:
            yield text
            return
        start = 0
        for match in self._splits.finditer(text):
            yield from _parts(text[start : match.start()])
            yield match[0]
            start = match.end()
        yield from _parts(text[start:])

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        return [self._encoding.decode([each]) for each in ids]


def _parts(text: str) -> Iterator[str]:
    for start in range(0, len(text), _MAX_CHARS):
        window = text[start : start + _MAX_CHARS]
        begin = 0
        if len(window) > _MAX_RUN:
            for run in _RUNS.finditer(window):
                for end in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                    yield window[begin:end]
                    begin = end
        yield window[begin:]


def _boundaries(tokenizer: KimiTokenizer, splitting: set[str], hints: str) -> Boundaries:
    """Find where texts may be cut: at tokens at which the engine splits them, too.

    Raises:
        NeedsEngine: special tokens overlap, are also plain tokens, or are not in the vocabulary.
    """
    specials: dict[str, int] = tokenizer.specials
    vocabulary = tokenizer.encoding._mergeable_ranks
    for token in (*specials, *splitting):
        if not _PLAIN.fullmatch(token) or token.encode() in vocabulary or token not in specials:
            raise NeedsEngine("model", f"special token {token!r}")
    for token in tokenizer.added_tokens_decoder.values():
        if token.lstrip or token.rstrip or token.single_word:
            raise NeedsEngine("model", f"special token {token.content!r}")

    def found(hidden: set[str]) -> Boundaries:
        added = [
            {"content": token, "special": True, "lstrip": is_hidden, "rstrip": is_hidden}
            for token in specials
            for is_hidden in (token in hidden,)
        ]
        return find_boundaries({"added_tokens": added, "model": {"type": "BPE"}}, hints)

    if len(found(set()).apart) < len(specials):
        raise NeedsEngine("model", "special tokens overlap")
    return found(set(specials) - splitting)


class KimiArguments:
    """Changes the arguments of a template as the class does."""

    __slots__ = ("_code",)

    def __init__(self, code: KimiCode) -> None:
        self._code = code

    def __call__(self, arguments: dict[str, Any], memo: JsonMemo) -> dict[str, Any]:
        """Return the arguments as the template gets them.

        Raises:
            NeedsEngine: tools so deep that the result depends on the engine's stack.
        """
        changed = self._code.template_defaults | arguments
        tools = arguments.get("tools")
        if tools is None or not self._code.sorts_tools:
            return changed
        key = b"sorted" + orjson.dumps(tools)
        known: tuple[Any, str | None] | None = memo.get(key)
        if known is None:
            try:
                ordered = sort_keys(tools)
            except RecursionError as exc:
                raise NeedsEngine("tools", "too deep") from exc
            declared = declare_tools(ordered) if self._code.declares_tools and ordered else None
            known = ordered, declared
            memo.put(key, known, (ordered, *ordered))
        changed["tools"], in_typescript = known
        if in_typescript is not None:
            changed["tools_ts_str"] = in_typescript
        return changed
