"""Bytes that were right once: cut, doubled, overwritten; decoders have fallen to what is put in."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.effort import FUZZ_SECONDS

FIXED = settings(
    derandomize=not FUZZ_SECONDS,  # in the suite: the same examples every time
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NASTY = (
    b"[" * 3_000,
    b'{"a":' * 3_000,
    b"[" * 3_000 + b"]" * 3_000,
    b"9" * 400,
    b"1e999",
    b"-1",
    b"-0.0",
    b"NaN",
    b"null",
    b"true",
    b'""',
    b"{}",
    b"[]",
    b'"\\ud800"',
    b'"\\u0000"',
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x00",
    b"\r\n",
    b"\n\n",
    b"data: ",
    b",",
    b"18446744073709551616",
)


@st.composite
def mutated(draw: st.DrawFn, samples: Sequence[bytes], nasty: Sequence[bytes] = NASTY) -> bytes:
    """Draw one of the samples with up to four things done to it."""
    made = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(made)))
        stop = draw(st.integers(start, min(len(made), start + 40)))
        put = draw(
            st.one_of(
                st.just(b""),
                st.just(made[start:stop] * 2),
                st.sampled_from(nasty),
                st.binary(max_size=8),
            )
        )
        made = made[:start] + put + made[stop:]
    return made
