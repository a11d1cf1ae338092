"""router.api.model_aliases: which bodies get another model's name, and what of them changes."""

from __future__ import annotations

import pytest

from router.api.model_aliases import ModelAliases

ALIASES = ModelAliases({"claude-haiku-*": "small", "claude-*": "large", "gpt.4": "large"})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"claude-haiku-9","n":1}', b'{"model":"small","n":1}'),
        (b'{"n": 1, "model" : "claude-opus-9"}', b'{"model":"large","n": 1}'),
        (b'{"model":"gpt.4"}', b'{"model":"large"}'),
        (b'{"model":"claude-\\nx"}', b'{"model":"large"}'),
        (b'{"model":"a","model":"claude-x"}', b'{"model":"large"}'),
    ],
)
def test_an_alias_becomes_the_served_model(body: bytes, expected: bytes) -> None:
    """The first name that fits counts, and nothing else of the body changes."""
    assert ALIASES.apply(body, ()) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"gpt-4"}',
        b'{"model":"my-claude-x"}',
        b'{"model":"claude-x","model":"served"}',
        b'{"model":null}',
        b'{"messages":[{"model":"claude-x"}]}',
        b'["claude-x"]',
        b"not json",
        b"",
        None,
    ],
)
def test_other_bodies_stay_as_they_are(body: bytes | None) -> None:
    """Byte for byte the same object, whatever it is."""
    assert ALIASES.apply(body, ()) is body


def test_no_alias_hides_a_model_that_is_served() -> None:
    body = b'{"model":"claude-x"}'

    assert ALIASES.apply(body, {"claude-x"}) is body
    assert ModelAliases({}).apply(body, ()) is body
