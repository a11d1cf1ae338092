"""Fuzz: bodies of `/v1/messages`: tokens, an engine's to make, or an error of the client's."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import strategies as st

from router.api import apis
from router.api.anthropic import (
    Unknown,
    arguments_of,
    parse_count,
    parse_messages,
    usage_of_message,
    usage_of_messages,
)
from router.api.body import make_outline
from router.api.engine_bodies import tokenize_chat
from router.base.errors import ClientError
from router.tokens import NeedsEngine
from tests.fuzz.budget import fuzz
from tests.fuzz.damage import mutated
from tests.fuzz.values import PROMPTER, SCALARS, TEXTS, VALUES, is_sane

KINDS = (
    "text image tool_use tool_result tool_reference thinking redacted_thinking tool_addition "
    "tool_removal document tool_definition"
).split()
FIELDS = (
    "text source id tool_use_id name input content is_error tool_name thinking signature data tool "
    "definition input_schema url"
).split()
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS)},
        optional=dict.fromkeys(FIELDS, TEXTS | VALUES),
    )
    | VALUES,
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]) | SCALARS,
            "content": TEXTS | BLOCKS | VALUES,
        }
    )
    | VALUES,
    max_size=4,
)
TOOLS = st.lists(
    st.fixed_dictionaries({"name": TEXTS, "input_schema": VALUES}, optional={"strict": VALUES}),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"messages": MESSAGES | VALUES},
    optional={
        "model": st.just("tiny") | SCALARS,
        "system": TEXTS | BLOCKS | VALUES,
        "tools": TOOLS | VALUES,
        "tool_choice": st.fixed_dictionaries({"type": TEXTS | VALUES}) | VALUES,
        "thinking": st.fixed_dictionaries({"type": TEXTS | VALUES}) | VALUES,
        "output_config": st.fixed_dictionaries({"effort": TEXTS | VALUES}) | VALUES,
        "chat_template_kwargs": VALUES,
        "kv_transfer_params": VALUES,
        "max_tokens": SCALARS,
        "stream": SCALARS,
    },
)


@fuzz(BODIES)
def test_a_body_is_tokens_or_an_error_of_the_clients(body: Any) -> None:
    """Never anything else; and what an engine is asked instead can be written."""
    try:
        data = json.dumps(body).encode()
        read = orjson.loads(data)
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        return
    for parse in (parse_messages, parse_count):
        try:
            request = parse(read)
            orjson.dumps(tokenize_chat(request))
            plan = PROMPTER.plan_chat(request)
            tokens = PROMPTER.commit(plan, plan.encode())
            assert len(tokens.ids()) == tokens.num_tokens
        except (ClientError, NeedsEngine):
            pass
    try:
        outlined = apis.MESSAGES.outlined(make_outline(data))
        assert outlined is not None
        assert outlined.engine_only is not None
    except ClientError:
        pass


@fuzz(st.dictionaries(TEXTS, TEXTS | VALUES, max_size=3))
def test_arguments_are_those_of_the_engine(given: dict[str, Any]) -> None:
    """Character by character what `json.dumps` writes, or the engine's own affair."""
    try:
        read = orjson.loads(json.dumps(given))
        assert arguments_of(read) == json.dumps(read)
    except (orjson.JSONDecodeError, UnicodeEncodeError, Unknown):
        pass


SAMPLES = (
    b'{"usage":{"input_tokens":7,"output_tokens":1,"cache_read_input_tokens":64}}',
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":7}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)


@fuzz(mutated(SAMPLES) | st.binary(max_size=200))
def test_any_bytes_have_a_usage_or_none(data: bytes) -> None:
    """Of a whole answer and of a stream's end."""
    assert is_sane(usage_of_message(data))
    assert is_sane(usage_of_messages(data))
