from __future__ import annotations

import pytest

from loadtest.engines.vllm import is_wide


@pytest.mark.parametrize(
    ("cpu_info", "wide"),
    [
        ("processor : 0\nflags\t\t: fma avx avx2\n\nprocessor : 1\nflags : fma avx avx2\n", True),
        ("processor : 0\nflags\t\t: avx2 avx512f avx512_bf16\n", False),
        ("processor : 0\nFeatures\t: asimd bf16\n", False),  # ARM
        ("", False),
    ],
)
def test_engines_compute_in_numbers_that_the_processor_is_quick_at(
    cpu_info: str, wide: bool
) -> None:
    """In float32 where x86 has no AVX-512; else as the model's configuration says."""
    assert is_wide(cpu_info) == wide
