"""Fuzz: the tenants' file. Whatever is in it, it is taken, or refused in words; nothing else."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.errors import ConfigError
from router.tenants.tenants import TenantEntry, parse

GOOD = yaml.safe_dump(
    {
        "secret": "0123456789abcdef" * 2,
        "tenants": [
            {
                "name": "a",
                "keys": ["sha256:" + "0a" * 32],
                "models": ["tiny"],
                "max_in_flight": 5,
                "weight": 2.0,
            },
            {"name": "b", "cache": "group", "priority": -3},
            {"name": "c", "salt": "x" * 30},
        ],
    }
).encode()
FIELDS = st.sampled_from(TenantEntry.__struct_fields__) | st.text(max_size=6)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.sampled_from(["own", "shared", "sha256:" + "0b" * 32]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
PIECES = [b"[", b"{", b"- ", b"&a ", b"*a", b"<<: ", b"!!python/name:os.system ", b"\xff", b"\0",
          b"? ", b"1e999", b"2001-13-40", b"\n", b"\t", b"'", b"---\n", b"%YAML 9.9\n"]  # fmt: skip


def taken(data: bytes) -> bool:
    """Read it; anything but a ConfigError is an error of the test."""
    with suppress(ConfigError):
        made = parse(data)
        return len({tenant.name for tenant in made.tenants}) == len(made.tenants) > 0
    return False


@settings(max_examples=150)
@given(st.dictionaries(FIELDS, VALUES, max_size=5), VALUES)
def test_any_entry_is_taken_or_refused(entry: dict[str, Any], secret: Any) -> None:
    """Of any types, nested in any way."""
    tree = {"secret": secret, "tenants": [{"name": "a", "cache": "shared"} | entry]}
    taken(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"))


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_any_damage_is_taken_or_refused(seed: int) -> None:
    """Bytes of a good file flipped, cut out, doubled; YAML's odder syntax put in."""
    rng = random.Random(seed)
    data = bytearray(GOOD)
    assert taken(bytes(data))
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.randint(0, 20))
        match rng.randrange(4):
            case 0:
                del data[start:end]
            case 1:
                data[start:start] = data[start:end]
            case 2:
                data[start:start] = rng.choice(PIECES)
            case _:
                data[start:end] = rng.randbytes(end - start)
    taken(bytes(data))
