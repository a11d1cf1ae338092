"""router.config.yaml_file: what every file in YAML is refused for, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.base.errors import ConfigError
from router.config import load, yaml_file


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a: 1\nb: [", "line 2: not YAML: "),
        (b"a: 1\nb: {c: 1,\n  c: 2}", "line 3: not YAML: a key is given twice"),
        (b"a: 1\n5: b", "line 2: not YAML: a key must be text"),
        (b"a: !hunter2 x", "line 1: not YAML: could not determine a constructor for the tag …"),
        (b"a: [1\n", "line 1: not YAML: did not find expected ',' or ']'"),
        (b"a: 2001-99-99", "not YAML (ValueError)"),
        (b"a: \xff", "not YAML (UnicodeDecodeError)"),
        (b"[" * 5000, "not YAML"),
        (b" " * (yaml_file.MAX_BYTES + 1), "larger than 4194304 bytes"),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(data: bytes, said: str) -> None:
    """And what a file has in quotes, or as a tag, is not repeated."""
    with pytest.raises(ConfigError) as caught:
        yaml_file.parse(data)

    assert said in caught.value.message
    assert "hunter2" not in caught.value.message


def test_anchors_and_merges_are_no_keys_twice() -> None:
    """What a mapping says itself counts more than what it takes over."""
    tree = yaml_file.parse(b"a: &a {x: 1, y: 1}\nb: {<<: *a, y: 2}\nc: {<<: *a, <<: *a}\n")

    assert tree == {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 1}}


def test_the_configuration_names_its_file_and_line(tmp_path: Path) -> None:
    """A key given twice would have hidden what was said first."""
    file = tmp_path / "warmroute.yaml"
    file.write_text("listen: {port: 1}\nlisten: {host: h}\n")

    with pytest.raises(ConfigError) as caught:
        load(file)

    assert caught.value.message == f"{file}: line 2: not YAML: a key is given twice"
