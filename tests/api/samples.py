"""Bodies of any JSON whatsoever, in the words of the Responses API."""

from __future__ import annotations

from hypothesis import strategies as st

_KEYS = st.sampled_from(
    "type role content text output summary id call_id name namespace arguments status input tools "
    "function parameters model stream reasoning effort instructions truncation custom".split()
)
_WORDS = st.sampled_from(
    "message reasoning function_call function_call_output custom_tool_call custom namespace user "
    "assistant developer input_text output_text in_progress function {} x".split()
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=20,
)

bodies = st.fixed_dictionaries({}, optional={"input": _json, "tools": _json}) | st.dictionaries(
    _KEYS, _json, max_size=6
)
