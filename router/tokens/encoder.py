"""Text and token ids as bytes with boundaries, and the encoding of the segments between them.

Everything a thread may run without the loop is here and pure: `TextEncoder.encode`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from router.api.openai import TokenIds
from router.tokens.boundaries import Boundaries, Needle, find_boundaries
from router.tokens.fast_encoder import FastEncoder, FastEncoderFailed
from router.tokens.incremental import Boundary, NewSegment
from router.tokens.proof import encode_plainly, find_difference

MIN_SEGMENT_BYTES = 512
"""Boundaries nearer to the last one are passed over: about 130 tokens are encoded again at most,
and a prompt of 400 KB has some hundred segments, not thousands."""

ID_STRIDE = 1024
"""Tokens per segment of a prompt that came as token ids."""

_BATCH_BYTES = 256 * 1024

_NO_BOUNDARY = 1 << 62


class TextCuts:
    """The boundaries in one text's UTF-8 bytes, found lazily."""

    __slots__ = ("_data", "_found", "_min_bytes", "_needles")

    def __init__(
        self, data: bytes, needles: Sequence[Needle], min_bytes: int = MIN_SEGMENT_BYTES
    ) -> None:
        self._data = data
        self._needles = needles
        self._min_bytes = min_bytes
        self._found = [-1] * len(needles)  # the next boundary at each needle

    def after(self, position: int) -> Boundary | None:
        earliest = position + self._min_bytes
        best, guard = _NO_BOUNDARY, b""
        for index, needle in enumerate(self._needles):
            found = self._found[index]
            if found < earliest:
                start = self._data.find(needle.text, max(earliest - needle.offset, 0))
                found = self._found[index] = start + needle.offset if start >= 0 else _NO_BOUNDARY
            if found < best:
                best, guard = found, needle.guard
        return Boundary(best, guard) if best < _NO_BOUNDARY else None


class IdCuts:
    """The boundaries in the bytes of an array of token ids: one every `ID_STRIDE`."""

    __slots__ = ("_num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def after(self, position: int) -> Boundary | None:
        end = position + 4 * ID_STRIDE
        return Boundary(end, b"") if end <= self._num_bytes else None


def slice_ids(data: bytes, new: Sequence[NewSegment]) -> list[TokenIds]:
    """Take the segments' ids out of the bytes of an array of ids."""
    return [array("I", data[segment.start : segment.end]) for segment in new]


class TextEncoder:
    """One model's tokenizer, cut where its own description says it may be.

    Segments are encoded by fastokens once it has been proven (`quicken`), all else by `tokenizers`.

    Args:
        tokenizer: The backend; its truncation and padding are switched off.
        hints: Text in which useful boundary tokens occur: the chat template.

    max_chars_per_token: Of the longest token in the vocabulary, as vLLM counts it.
    failure: Why fastokens was given up in the middle of its work; None: it was not.
    prefix, suffix: Tokens that `add_special_tokens` puts around a text; None: it does more than
        that, such texts are not cut.
    """

    __slots__ = (
        "_anchor",
        "_apart",
        "_fast",
        "_needles",
        "_tokenizer",
        "failure",
        "max_chars_per_token",
        "prefix",
        "suffix",
    )

    def __init__(self, tokenizer: Tokenizer, hints: str = "") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._fast: FastEncoder | None = None
        self.failure: str | None = None
        # Source: vllm/tokenizers/hf.py at 0.32.0, max_chars_per_token
        self.max_chars_per_token = max(map(len, tokenizer.get_vocab()), default=1)
        found: Boundaries = find_boundaries(json.loads(tokenizer.to_str()), hints)
        self._needles = found.needles
        self._apart = found.apart
        self._anchor = found.anchor
        ends = _ends(tokenizer) if found.has_plain_ends else None
        self.prefix: TokenIds | None = ends[0] if ends is not None else None
        self.suffix: TokenIds | None = ends[1] if ends is not None else None

    def token_apart(self, token_id: int) -> str | None:
        """Return an added token's text if the text around it can be encoded without it."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token if token in self._apart else None

    def cuts(self, data: bytes) -> TextCuts:
        """Find the boundaries of a text."""
        return TextCuts(data, self._needles)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode segments of a text; pure, thread-safe, without the GIL for most of the time.

        The last of `new` is the text's tail: `suffix` goes behind it.
        """
        encoded: list[TokenIds] = []
        for batch in _batches(new):
            encoded += self._encode([self._piece(data, segment) for segment in batch])
        if self._anchor:
            encoded = [
                ids[1:] if segment.start else ids for ids, segment in zip(encoded, new, strict=True)
            ]
        if suffix:
            encoded[-1] = encoded[-1] + suffix
        return encoded

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        fast = self._fast
        if fast is not None:
            try:
                return fast.encode(texts)
            except FastEncoderFailed as exc:
                self.failure = str(exc)
                self._fast = None
        return encode_plainly(self._tokenizer, texts)

    def _piece(self, data: bytes, segment: NewSegment) -> str:
        text = data[segment.start : segment.end].decode()
        return self._anchor + text if self._anchor and segment.start else text

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """Decode each token by itself; one that is not a whole character is not readable."""
        return [self._decode([each], skip_special_tokens=False) for each in ids]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @property
    def is_fast(self) -> bool:
        """Return whether segments are encoded by fastokens."""
        return self._fast is not None

    def quicken(self) -> str | None:
        """Load fastokens and prove it; blocking, up to seconds: off the loop.

        Returns why it is not used; None: it is, from now on.
        """
        try:
            fast = FastEncoder(self._tokenizer.to_str())
            difference = find_difference(self._tokenizer, fast)
        except FastEncoderFailed as exc:
            return str(exc)
        if difference is None:
            self._fast = fast
        return difference

    def slow_down(self) -> bool:
        """Encode by `tokenizers` from now on; return whether it was another before."""
        was_fast = self._fast is not None
        self._fast = None
        return was_fast

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a text at once by `tokenizers`, as the engine does: what all else is held to."""
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encodings[0].ids)


def _batches(new: Sequence[NewSegment]) -> Iterator[Sequence[NewSegment]]:
    """Group segments: freeing what one encode leaves behind holds the interpreter."""
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
