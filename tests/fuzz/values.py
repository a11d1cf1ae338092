"""Values and texts of request bodies, and a prompter that reads them."""

from __future__ import annotations

from hypothesis import strategies as st

from loadtest.tiny_model import MODEL_DIR
from router.api.answers import Usage
from router.tokens import load_prompter

PROMPTER = load_prompter(str(MODEL_DIR), local_files_only=True)


NAMES = (
    "role content type text name function arguments tool_calls id parameters description strict "
    "reasoning_content tool_call_id input_audio audio user_id"
).split()


TEXTS = st.text(max_size=12) | st.sampled_from(
    [*NAMES, "user", "assistant", "system", "tool", "developer", "text", "function", "{}", "auto"]
)


NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)


SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS


VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | TEXTS, inner, max_size=5)
    ),
    max_leaves=16,
)


def is_sane(usage: Usage | None) -> bool:
    """Whether what was read can be counted with."""
    if usage is None:
        return True
    numbers = (usage.prompt_tokens, usage.completion_tokens, usage.num_cached_tokens)
    return all(number is None or isinstance(number, int) for number in numbers)
