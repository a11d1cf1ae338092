"""router.config: one tree, merged from defaults, file, environment and flags; strict."""

from __future__ import annotations

from pathlib import Path

import pytest

from router import config
from router.config import Config, load
from router.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    """Write a configuration file."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_are_the_struct_fields() -> None:
    """Nothing given, nothing changed."""
    assert load() == Config()


def test_flags_overrule_the_environment_which_overrules_the_file(tmp_path: Path) -> None:
    """Each source beats the one before it, key by key."""
    file = write(tmp_path, "listen: {host: 127.0.0.1, port: 1}\npolicy: {name: random}\n")

    loaded = load(file, {"WARMROUTE_LISTEN_PORT": "2"}, {("policy", "name"): "min_ttft"})

    assert loaded.listen == config.ListenConfig(host="127.0.0.1", port=2)
    assert loaded.policy.name == "min_ttft"


def test_replicas_may_be_bare_urls_everywhere(tmp_path: Path) -> None:
    """A URL alone is a replica, from a flag, a variable or the file."""
    by_flag = load(flags={("replicas",): ["http://a:1", "http://b:2"]})
    by_variable = load(environ={"WARMROUTE_REPLICAS": "http://a:1,http://b:2"})
    by_file = load(write(tmp_path, "replicas: ['http://a:1', {url: 'http://b:2'}]"))

    assert by_flag == by_variable == by_file
    assert [r.url for r in by_flag.replicas] == ["http://a:1", "http://b:2"]


def test_mappings_come_as_pairs() -> None:
    """NAME=VALUE pairs keep numbers as numbers."""
    loaded = load(environ={"WARMROUTE_POLICY_PARAMS": "alpha=1.5,mode=x"})

    assert loaded.policy.params == {"alpha": 1.5, "mode": "x"}


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("lissen: {}", "lissen", "did you mean 'listen'"),
        ("listen: {prot: 3}", "listen.prot", "did you mean 'port'? Known here: host, port"),
        ("replicas: [{url: 'http://a', evnts: []}]", "replicas[0].evnts", "did you mean 'events'"),
        ("listen: {port: 99999}", "listen.port", "<= 65535"),
        ("listen: 3", "listen", "Expected `object`"),
        ("replicas: ['a:1']", "replicas[0].url", "http://HOST:PORT"),
        ("replicas: ['http://a?x=1']", "replicas[0].url", "no query"),
        ("replicas: [{url: 'http://a', name: 'x y'}]", "replicas[0].name", "letters, digits"),
        ("replicas: [{url: 'http://a', name: r2}, 'http://b']", "replicas[1].name", "used twice"),
        (
            "replicas: [{url: 'http://a', events: ['tcp://a:1'], replay: ['tcp://a:2', 'tcp://a:3']}]",
            "replicas[0].replay",
            "one endpoint per entry",
        ),
        ("admin: {host: 0.0.0.0}", "admin.token_file", "reachable from outside"),
        ("log: {level: loud}", "log.level", "debug|info|warning|error"),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path: Path, text: str, key: str, said: str) -> None:
    """The message names the key and what is allowed there."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))

    assert caught.value.param == key
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["a: [", "- a", "\x00"])
def test_what_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """Broken YAML and lists are no configuration."""
    with pytest.raises(ConfigError, match=r"warmroute\.yaml"):
        load(write(tmp_path, text))


def test_an_empty_file_is_a_default_configuration(tmp_path: Path) -> None:
    """A file with comments only changes nothing."""
    assert load(write(tmp_path, "# nothing\n")) == Config()


def test_a_missing_file_is_refused() -> None:
    """The message says what the system said."""
    with pytest.raises(ConfigError, match="No such file"):
        load(Path("/nowhere.yaml"))


def test_a_scalar_where_a_section_belongs_is_refused(tmp_path: Path) -> None:
    """A variable cannot reach into a section that the file made a scalar."""
    with pytest.raises(ConfigError, match="listen: must be a mapping"):
        load(write(tmp_path, "listen: 3"), {"WARMROUTE_LISTEN_PORT": "1"})


def test_a_pair_without_a_value_is_refused() -> None:
    """The flag is named."""
    with pytest.raises(ConfigError, match="--policy-param: 'alpha' is not NAME=VALUE"):
        load(environ={"WARMROUTE_POLICY_PARAMS": "alpha"})


def test_every_key_has_a_flag_a_variable_and_a_description() -> None:
    """No option hides from `--help`; no two share a flag."""
    found = list(config.options())

    assert all(option.description for option in found)
    assert len({option.flag for option in found}) == len(found)
    assert {"replica", "port", "policy", "admin-port", "decision-log"} <= {o.flag for o in found}
