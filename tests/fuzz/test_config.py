"""Fuzz: a configuration is read, or refused with a ConfigError; nothing else comes out."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from router import config
from router.base.errors import ConfigError
from router.config import Config, load
from tests.fuzz.damage import FIXED, NASTY, mutated

OPTIONS = list(config.options())
FILE = b"""replicas:
  - http://10.0.0.5:8000
  - {url: http://10.0.0.6:8000, name: spare, events: [tcp://10.0.0.6:5557]}
listen: {host: 127.0.0.1, port: 8080}
policy: {name: kv_aware, params: {alpha: 2}}
redis: {url: redis://127.0.0.1:6379/0, lease_s: 3}
experiment: {name: e, variants: [{name: a, policy: random}, {name: b, policy: "kv_aware:alpha=2"}]}
tokens: {models: {tiny: /models/tiny}, prove_ratio: 0.1}
log: {level: info, json: true, decisions: decisions.jsonl}
"""
WORDS = (
    "http://a:1", "http://[::1", "http://u:p@h", "https://h:99999", "redis://h:1/0", "unix://",
    "-1", "0", "1e400", "nan", "inf", "true", "a=b", "=", "a=", "a=[", "min_ttft:x=1", "kv_aware",
    "\0", "127.0.0.1/33", "::1", "*:1", "tcp://h:1", "a b", "\ud800", "9" * 500, ".." * 300,
    "/dev/null",
)  # fmt: skip
TEXT = st.sampled_from(WORDS) | st.text(max_size=20)
KEYS = st.sampled_from([name for option in OPTIONS for name in option.path]) | TEXT
YAML = (
    *(word for word in NASTY if len(word) < 1000),
    b"[" * 500,
    b"- " * 300,
    b"&a [*a]",
    b"!!x",
    b"? ",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def is_read_or_refused(*args: Any) -> None:
    """Load; anything but a ConfigError fails the test."""
    with contextlib.suppress(ConfigError):
        assert isinstance(load(*args), Config)


@FIXED
@given(data=mutated((FILE,), YAML) | st.binary(max_size=60))
def test_any_file(file: Path, data: bytes) -> None:
    """No YAML, or YAML of something else."""
    file.write_bytes(data)
    is_read_or_refused(file)


@FIXED
@given(tree=st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_tree(file: Path, tree: dict[str, Any]) -> None:
    """Known and unknown keys, with values of any kind."""
    file.write_text(yaml.dump(tree, allow_unicode=False), encoding="utf-8", errors="replace")
    is_read_or_refused(file)


@FIXED
@given(
    option=st.sampled_from(OPTIONS),
    value=VALUES,
    wrap=st.sampled_from(
        (lambda v: v, lambda v: [v], lambda v: {"url": v}, lambda v: [{"url": v}])
    ),
)
def test_any_value_of_any_key(file: Path, option: config.Option, value: Any, wrap: Any) -> None:
    """Each key of the tree, in a file."""
    tree: Any = wrap(value)
    for name in reversed(option.path):
        tree = {name: tree}
    file.write_text(yaml.dump(tree, allow_unicode=False), encoding="utf-8", errors="replace")
    is_read_or_refused(file)


@FIXED
@given(
    environ=st.dictionaries(st.sampled_from([o.variable for o in OPTIONS]), TEXT, max_size=4),
    flags=st.dictionaries(
        st.sampled_from([o.path for o in OPTIONS]), TEXT | st.lists(TEXT, max_size=3), max_size=3
    ),
)
def test_any_variables_and_flags(
    environ: dict[str, str], flags: dict[tuple[str, ...], Any]
) -> None:
    """As a shell hands them over: text, and lists of it."""
    is_read_or_refused(None, environ, flags)
