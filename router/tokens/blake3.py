"""BLAKE3 by numpy: the hash by which engines name images, without another dependency.

The chunks of a text are hashed side by side, 1,024 bytes each, then joined as a tree, level by
level. Some 20 ms a megabyte: for a thread, once an image. Source: the BLAKE3 paper, section 2.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

_Words = np.ndarray[Any, np.dtype[np.uint32]]

_IV: Final = np.array(
    [
        *(0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A),
        *(0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19),
    ],
    np.uint32,
)
_PERMUTATION: Final = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_CHUNK_BYTES: Final = 1024
_BLOCK_BYTES: Final = 64
_BATCH_CHUNKS: Final = 1024


def blake3_hex(data: bytes) -> str:
    """Hash bytes to 64 hexadecimal digits; thread-safe."""
    num_chunks = max(1, -(-len(data) // _CHUNK_BYTES))
    if num_chunks == 1:
        return _hex(_chunks(data, 0, 1, _ROOT))
    level = np.concatenate(
        [
            _chunks(data, first, min(_BATCH_CHUNKS, num_chunks - first), 0)
            for first in range(0, num_chunks, _BATCH_CHUNKS)
        ],
        axis=1,
    )
    while level.shape[1] > 1:
        num_pairs = level.shape[1] // 2
        pairs = level[:, : 2 * num_pairs]
        message = np.concatenate((pairs[:, 0::2], pairs[:, 1::2]))
        flags = _PARENT | (_ROOT if level.shape[1] == 2 else 0)
        zeros = np.zeros(num_pairs, np.uint32)
        start = np.repeat(_IV[:, None], num_pairs, axis=1)
        joined = _compress(start, message, zeros, zeros + _BLOCK_BYTES, zeros + flags)
        level = np.concatenate((joined, level[:, 2 * num_pairs :]), axis=1)  # an odd one goes up
    return _hex(level)


def _chunks(data: bytes, first: int, num_chunks: int, last_flags: int) -> _Words:
    """Hash consecutive chunks; shape (8, num_chunks)."""
    part = data[first * _CHUNK_BYTES : (first + num_chunks) * _CHUNK_BYTES]
    padded = part.ljust(num_chunks * _CHUNK_BYTES, b"\0")
    words = np.frombuffer(padded, "<u4").astype(np.uint32).reshape(num_chunks, 16, 16)
    sizes = np.full(num_chunks, _CHUNK_BYTES)
    sizes[-1] = len(part) - (num_chunks - 1) * _CHUNK_BYTES
    num_blocks = np.maximum(1, -(-sizes // _BLOCK_BYTES))
    counters = np.arange(first, first + num_chunks).astype(np.uint32)
    state = np.repeat(_IV[:, None], num_chunks, axis=1)
    for block in range(int(num_blocks.max())):
        lengths = np.clip(sizes - block * _BLOCK_BYTES, 0, _BLOCK_BYTES).astype(np.uint32)
        flags = np.where(num_blocks == block + 1, _CHUNK_END | last_flags, 0)
        flags = (flags | (_CHUNK_START if block == 0 else 0)).astype(np.uint32)
        message = np.ascontiguousarray(words[:, block].T)
        after = _compress(state, message, counters, lengths, flags)
        state = np.where(block < num_blocks, after, state)  # the last chunk may be shorter
    return state


def _compress(
    chaining: _Words, message: _Words, counters: _Words, lengths: _Words, flags: _Words
) -> _Words:
    """Compress one block of each column; counters stay below 2**32: 4 TiB."""
    a, b = chaining[:4].copy(), chaining[4:].copy()
    c = np.repeat(_IV[:4, None], chaining.shape[1], axis=1)
    d = np.stack((counters, np.zeros_like(counters), lengths, flags))
    order = list(range(16))
    for _ in range(7):
        _mix(a, b, c, d, message[order[0:8:2]], message[order[1:8:2]])
        b, c, d = b[[1, 2, 3, 0]], c[[2, 3, 0, 1]], d[[3, 0, 1, 2]]
        _mix(a, b, c, d, message[order[8::2]], message[order[9::2]])
        b, c, d = b[[3, 0, 1, 2]], c[[2, 3, 0, 1]], d[[1, 2, 3, 0]]
        order = [order[position] for position in _PERMUTATION]
    return np.concatenate((a ^ c, b ^ d))


def _mix(a: _Words, b: _Words, c: _Words, d: _Words, first: _Words, second: _Words) -> None:
    """Mix four columns in place."""
    for words, turn, other in ((first, 16, 12), (second, 8, 7)):
        a += b
        a += words
        d ^= a
        _rotate(d, turn)
        c += d
        b ^= c
        _rotate(b, other)


def _rotate(words: _Words, num_bits: int) -> None:
    left = words << np.uint32(32 - num_bits)
    words >>= np.uint32(num_bits)
    words |= left


def _hex(words: _Words) -> str:
    return words[:, 0].astype("<u4").tobytes().hex()
