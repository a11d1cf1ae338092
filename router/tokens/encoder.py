"""Encode text with a model's tokenizer.json: by fastokens if proven, else by `tokenizers`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from router.api.openai import TokenIds
from router.tokens.boundaries import Boundaries, TextCuts, find_boundaries
from router.tokens.encoders import PlainEncoder
from router.tokens.fast_encoder import FastEncoder, FastEncoderFailed
from router.tokens.incremental import NewSegment
from router.tokens.proof import encode_plainly, find_difference

_BATCH_BYTES = 256 * 1024


class TextEncoder(PlainEncoder):
    """One model's tokenizer. Texts are cut where its own description allows it.

    Segments are encoded by fastokens once it is proven (`quicken`), whole texts by `tokenizers`.

    Args:
        tokenizer: The backend; its truncation and padding are switched off.
        hints: Text that contains useful boundary tokens: the chat template.

    fast: Encodes segments, once it is proven. None: it is not in use.
    """

    __slots__ = ("_apart", "_needles", "_tokenizer", "fast")

    def __init__(self, tokenizer: Tokenizer, hints: str = "") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.fast: FastEncoder | None = None
        found: Boundaries = find_boundaries(json.loads(tokenizer.to_str()), hints)
        self._needles = found.needles
        self._apart = found.apart
        # Source: vllm/tokenizers/hf.py at 0.32.0, max_chars_per_token
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        ends = _ends(tokenizer) if found.has_plain_ends else None
        super().__init__(longest, *(ends or (None, None)))

    def token_apart(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token if token in self._apart else None

    def cuts(self, data: bytes) -> TextCuts:
        return TextCuts(data, self._needles)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode as `PlainEncoder.encode` does, without the GIL for most of the time."""
        encoded: list[TokenIds] = []
        is_small = not new or new[-1].end - new[0].start <= _BATCH_BYTES
        for batch in (new,) if is_small else _batches(new):
            encoded += self._encode([data[each.start : each.end].decode() for each in batch])
        if suffix:
            encoded[-1] = encoded[-1] + suffix
        return encoded

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        fast = self.fast
        if fast is not None:
            try:
                return fast.encode(texts)
            except FastEncoderFailed as exc:
                self.failure = str(exc)
                self.fast = None
        return encode_plainly(self._tokenizer, texts)

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        return [self._decode([each], skip_special_tokens=False) for each in ids]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @property
    def is_fast(self) -> bool:
        return self.fast is not None

    def quicken(self) -> str | None:
        try:
            fast = FastEncoder(self._tokenizer.to_str())
            difference = find_difference(self._tokenizer, fast)
        except FastEncoderFailed as exc:
            return str(exc)
        if difference is None:
            self.fast = fast
        return difference

    def slow_down(self) -> bool:
        was_fast = self.fast is not None
        self.fast = None
        return was_fast

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a text at once by `tokenizers`: everything else is compared with this."""
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encodings[0].ids)


def _batches(new: Sequence[NewSegment]) -> Iterator[Sequence[NewSegment]]:
    """Group segments. To free the memory of one large encode would block the interpreter."""
    start = size = 0
    for index, segment in enumerate(new):
        size += segment.end - segment.start
        if size > _BATCH_BYTES:
            yield new[start : index + 1]
            start, size = index + 1, 0
    if start < len(new):
        yield new[start:]


def _ends(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds] | None:
    """Find the tokens that special-token processing puts around any text; None: not clear.

    Two probes must agree, since the text's own tokens might look like the added ones.
    """
    candidates: list[set[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    for probe in ("a", "0 b"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        whole = tokenizer.encode(probe, add_special_tokens=True).ids
        candidates.append(
            {
                (tuple(whole[:start]), tuple(whole[start + len(bare) :]))
                for start in range(len(whole) - len(bare) + 1)
                if whole[start : start + len(bare)] == bare
            }
        )
    agreed = candidates[0] & candidates[1]
    if len(agreed) != 1:
        return None
    prefix, suffix = agreed.pop()
    return array("I", prefix), array("I", suffix)
