"""router.config.tree: it accepts what the loader accepts, and refuses unknown keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from loadtest.dev import docs
from router import config
from router.base.errors import ConfigError
from router.cli import main
from router.config.loader import json_schema
from tests.docs_blocks import ROOT, blocks

FILES = [
    *(path.read_text() for path in sorted((ROOT / "docker").glob("warmroute*.yaml"))),
    *(
        block.code
        for path in docs.documents()
        for block in blocks(path.read_text())
        if block.language == "yaml"
    ),
]
VALIDATOR = Draft202012Validator(json_schema())


def wrong(tree: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(tree)]


def test_the_schema_is_one() -> None:
    """And it is what `warmroute schema` prints."""
    printed = json.loads(CliRunner().invoke(main, ["schema"]).stdout)

    Draft202012Validator.check_schema(printed)
    assert printed == json.loads(json.dumps(json_schema()))


@pytest.mark.parametrize("text", FILES)
def test_it_accepts_every_file_of_the_documentation(text: str) -> None:
    """And those of docker/."""
    assert wrong(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "replicas: [http://h:1, {url: http://h:2}]",
        "queue: {mode: off}",
        "tokens: {hand_over: on}",
        "mooncake: {master: [http://a:1, http://b:1]}",
        "replicas: [{url: http://h, pool: a}]\nmooncake: {pools: [{name: a, master: http://a:1}]}",
        "discovery: {kubernetes_credentials: /tmp}",
    ],
)
def test_it_accepts_the_short_forms_that_the_loader_reads(text: str, tmp_path: Path) -> None:
    """Both read the same file."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(text)

    config.load(file)
    assert wrong(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "lissen: {port: 1}",
        "listen: {prot: 1}",
        "replicas: [{url: http://h, evens: []}]",
        "listen: {port: 99999}",
        "log: {level: loud}",
        "policy: 3",
        "redis: {password: x}",
        "mooncake: {pools: [a=http://a:1]}",
        "experiment: greedy.yaml",
    ],
)
def test_it_refuses_what_the_loader_refuses(text: str, tmp_path: Path) -> None:
    """Unknown keys, wrong types, values out of range."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError):
        config.load(file)
    assert wrong(yaml.safe_load(text))


def test_every_key_has_a_description_and_every_section_a_title() -> None:
    """Editors show them."""
    parts = json_schema()["$defs"]
    sections = parts["Config"]["properties"]

    for option in config.options():
        section, *rest = option.path
        node = sections[section]
        if rest:
            node = parts[node["$ref"].rpartition("/")[2]]["properties"][rest[0]]
        assert node["description"] == option.description
    assert {name: node["title"] for name, node in sections.items()} == config.SECTIONS
