"""router.config: one tree, merged from defaults, file, environment and flags; strict."""

from __future__ import annotations

from pathlib import Path

import pytest

from router import config
from router.base.errors import ConfigError, ConfigErrors
from router.config import Config, ListenConfig, ReplicaConfig, load


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


@pytest.mark.parametrize("text", ["on", "'on'", "off", "'off'"])
def test_a_switch_needs_no_quotes(tmp_path: Path, text: str) -> None:
    """YAML takes on and off for true and false."""
    assert load(write(tmp_path, f"queue: {{mode: {text}}}")).queue.mode == text.strip("'")


def test_a_map_of_efforts_is_given_as_engines_get_it() -> None:
    """A model's name, and the JSON of its engine's flag, whose commas separate no pairs."""
    name = "WARMROUTE_TOKENS_REASONING_EFFORT_MAPS"
    loaded = load(environ={name: 'tiny={"medium": "low", "xhigh": "max"},other={"none":"low"}'})

    efforts = {"tiny": {"medium": "low", "xhigh": "max"}, "other": {"none": "low"}}
    assert loaded.tokens.reasoning_effort_maps == efforts


def test_mappings_come_as_pairs() -> None:
    """NAME=VALUE pairs keep numbers as numbers."""
    environ = {"WARMROUTE_POLICY_PARAMS": "alpha=1.5", "WARMROUTE_TOKENS_MODELS": "a=x,b=y"}
    loaded = load(environ=environ)

    assert loaded.policy.params == {"alpha": 1.5}
    assert loaded.tokens.models == {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("lissen: {}", "lissen", "did you mean 'listen'"),
        ("listen: {prot: 3}", "listen.prot", "did you mean 'port'? (allowed: host, port"),
        ("replicas: [{url: 'http://a', evnts: []}]", "replicas[0].evnts", "did you mean 'events'"),
        ("listen: {port: 99999}", "listen.port", "at most 65535"),
        ("replicas: ['a:1']", "replicas[0].url", "http://HOST:PORT"),
        ("replicas: ['http://a?x=1']", "replicas[0].url", "no query"),
        ("replicas: [{url: 'http://a', name: 'x y'}]", "replicas[0].name", "letters, digits"),
        ("replicas: [{url: 'http://a', name: r2}, 'http://b']", "replicas[1].name", "used twice"),
        (
            "replicas: ['http://a:1', 'http://A:1/v1']",
            "replicas[1].url",
            "is already replicas[0].url",
        ),
        (
            "replicas: ['http://127.0.0.1:1', 'http://localhost:1/']",
            "replicas[1].url",
            "is already replicas[0].url (localhost:1)",
        ),
        (
            "replicas: [{url: 'http://a:1', events: ['tcp://a:5']}, "
            "{url: 'http://a:2', events: ['tcp://a:5']}]",
            "replicas[1].events[0]",
            "is already replicas[0].events[0] (a:5)",
        ),
        (
            "replicas: [{url: 'http://a:1', events: ['tcp://a:5'], replay: ['tcp://a:6']}, "
            "{url: 'http://a:2', events: ['tcp://*:7'], replay: ['tcp://*:6']}]",
            "replicas[1].replay[0]",
            "is already replicas[0].replay[0] (a:6)",
        ),
        (
            "replicas: [{url: 'http://a:1', events: ['tcp://a:5'], replay: ['tcp://a:5']}]",
            "replicas[0].replay[0]",
            "is already replicas[0].events[0]",
        ),
        (
            "replicas: [{url: 'http://a:1', events: ['tcp://a:1']}]",
            "replicas[0].events[0]",
            "is already replicas[0].url",
        ),
        (
            "replicas: [{url: 'http://a', events: ['tcp://a:1'], replay: ['tcp://a:2', 'tcp://a:3']}]",
            "replicas[0].replay",
            "one endpoint per entry",
        ),
        ("mooncake: {master: [1]}", "mooncake.master", "'1' is not a base URL"),
        ("mooncake: {master: ['http://a', 'b:1']}", "mooncake.master", "'b:1' is not a base URL"),
        ("admin: {host: 0.0.0.0, open: true}", "admin.open", "not allowed if other hosts can"),
        ("redis: {url: 'http://a:1'}", "redis.url", "redis://HOST:PORT/DB"),
        ("redis: {url: 'redis://a:1/x'}", "redis.url", "redis://HOST:PORT/DB"),
        ("redis: {url: 'unix://'}", "redis.url", "unix://PATH"),
        ("redis: {url: 'redis://r:6379', ca_file: ca}", "redis.ca_file", "use rediss://"),
        ("redis: {sentinels: ['a']}", "redis.sentinels", "not HOST:PORT"),
        ("redis: {sentinels: ['a:1']}", "redis.sentinel_service", "set both or none"),
        ("redis: {namespace: 'a b'}", "redis.namespace", "letters, digits"),
        ("redis: {lease_s: 0.1}", "redis.lease_s", "at least 0.5"),
        ("redis: {password: hunter2}", "redis.password", "WARMROUTE_REDIS_PASSWORD"),
        ("index: {mode: redis}", "index.mode", "needs redis.url"),
        ("queue: {mode: sometimes}", "queue.mode", "must be auto, on or off, not 'sometimes'"),
        ("queue: {fill: 0}", "queue.fill", "at least 0.1"),
        ("queue: {tbt_ms: 0}", "queue.tbt_ms", "more than 0"),
        ("queue: {tbt_ms: fast}", "queue.tbt_ms", "must be a number, not 'fast'"),
        ("queue: {max_wait_s: 0}", "queue.max_wait_s", "more than 0"),
        (
            "replicas: [{url: 'http://a', role: decoder}]",
            "replicas[0].role",
            "must be both, prefill or decode, not 'decoder'",
        ),
        ("prefill: {transfer: rdma}", "prefill.transfer", "must be store, mooncake or nixl"),
        (
            "replicas: [{url: 'http://a', role: prefill}]",
            "replicas[0].role",
            "prefill needs a partner: set role: decode for another replica with transfer store",
        ),
        (
            "replicas: ['http://b', {url: 'http://a', role: decode}]",
            "replicas[1].role",
            "decode needs a partner: set role: prefill",
        ),
        (
            "replicas: [{url: 'http://a', role: prefill, transfer: nixl},"
            " {url: 'http://b', role: decode}]",
            "replicas[0].role",
            "for another replica with transfer nixl",
        ),
        (
            "replicas: [{url: 'http://a', bootstrap: 'http://a:8998'}]",
            "replicas[0].bootstrap",
            "only for role prefill and transfer mooncake (this replica: both, store)",
        ),
        (
            "replicas: [{url: 'http://a', role: prefill, transfer: mooncake, bootstrap: 'a:1'},"
            " {url: 'http://b', role: decode, transfer: mooncake}]",
            "replicas[0].bootstrap",
            "http://HOST:PORT",
        ),
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
    with pytest.raises(
        ConfigError, match=r"POLICY_PARAMS: policy\.params: 'alpha' is not NAME=VALUE"
    ):
        load(environ={"WARMROUTE_POLICY_PARAMS": "alpha"})


def test_every_key_has_a_description_and_flags_differ() -> None:
    found = list(config.options())
    flags = [option.flag for option in found if option.flag]

    assert all(option.description for option in found)
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h:6379/3", "rediss://[::1]:6380", "unix:///tmp/r?db=2"]
)
def test_where_redis_is_may_be_said_in_these_ways(url: str) -> None:
    """TCP, TLS and a socket; a database is optional."""
    assert load(flags={("redis", "url"): url}).redis.is_configured
    assert not load().redis.is_configured


@pytest.mark.parametrize(
    "url",
    ["redis://u:hunter2@h:1/0", "redis://:hunter2@h:x", "unix:///tmp/r?password=hunter2"],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    """Command lines and files are read by others; the message names the two right places."""
    with pytest.raises(ConfigError) as caught:
        load(flags={("redis", "url"): url})

    assert "WARMROUTE_REDIS_PASSWORD" in caught.value.message
    assert "redis.password_file" in caught.value.message
    assert "hunter2" not in caught.value.message


def test_the_password_of_redis_is_no_part_of_the_tree(tmp_path: Path) -> None:
    """It comes from the variable, or from its file, which counts more; nothing shows it."""
    environ = {"WARMROUTE_REDIS_PASSWORD": "hunter2"}
    file = tmp_path / "password"
    file.write_text("hunter3\n")
    loaded = load(environ=environ)
    with_file = load(flags={("redis", "password_file"): file})

    assert config.redis_password(loaded.redis, environ) == "hunter2"
    assert config.redis_password(with_file.redis, environ) == "hunter3"
    assert config.redis_password(loaded.redis, {}) is None
    assert "hunter" not in repr(loaded)
    assert "password" not in {option.path[-1] for option in config.options()}


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), (b"\n", "is empty"), (b"\xff", "not UTF-8")]
)
def test_a_password_file_without_a_password_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    """The file is named."""
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(ConfigError, match=said) as caught:
        config.redis_password(config.RedisConfig(password_file=file), {})

    assert str(file) in caught.value.message


def test_a_replica_is_known_by_its_name_or_else_its_address() -> None:
    """However each router numbers its replicas."""
    named = config.ReplicaConfig(url="http://a:1/", name="east")

    assert (named.identity, config.ReplicaConfig(url="http://a:1/").identity) == (
        "east",
        "http://a:1",
    )


def test_a_partner_may_come_later(tmp_path: Path) -> None:
    """Where the admin API, or another router, can add replicas."""
    alone = "replicas: [{url: 'http://a', role: prefill}]\n"

    for more in ("admin: {allow_empty: true}", "redis: {url: 'redis://a:1'}"):
        assert load(write(tmp_path, alone + more)).replicas[0].role == "prefill"


@pytest.mark.parametrize(
    ("url", "bootstrap", "found"),
    [
        ("http://a:8000", None, "http://a:8998"),
        ("http://[::1]:8000", None, "http://[::1]:8998"),
        ("http://a:8000", "http://b:1/", "http://b:1"),
    ],
)
def test_where_a_bootstrap_server_is(url: str, bootstrap: str | None, found: str) -> None:
    """As configured, else at vLLM's default port of the same host."""
    assert config.bootstrap_of(config.ReplicaConfig(url=url, bootstrap=bootstrap)) == found


TWO_POOLS = [("east", "http://a:1,http://b:2"), ("west", "http://c:3")]


@pytest.mark.parametrize(
    "pools",
    [
        "[{name: east, master: 'http://a:1,http://b:2'}, {name: west, master: 'http://c:3'}]",
        "[{name: east, master: ['http://a:1', 'http://b:2']}, {name: west, master: ['http://c:3']}]",
    ],
)
def test_several_pools_have_names(tmp_path: Path, pools: str) -> None:
    """As mappings in the file; a replica says which one it is in."""
    replicas = "[{url: 'http://r:1', pool: east}, {url: 'http://r:2', pool: west}]"
    loaded = load(write(tmp_path, f"mooncake: {{pools: {pools}}}\nreplicas: {replicas}"))

    assert [(pool.name, pool.master) for pool in loaded.mooncake.each] == TWO_POOLS
    assert [config.pool_of(r, loaded.mooncake.names) for r in loaded.replicas] == ["east", "west"]


def test_a_pool_that_is_the_only_one_needs_no_name() -> None:
    """All replicas are in it, but those that are not."""
    named = [{"name": "east", "master": "http://a:1"}]
    for key, value, name in (("master", "http://a:1", ""), ("pools", named, "east")):
        loaded = load(
            flags={
                ("mooncake", key): value,
                ("replicas",): ["http://r:1", {"url": "http://r:2", "pool": False}],
            }
        )
        names = loaded.mooncake.names
        assert [config.pool_of(r, names) for r in loaded.replicas] == [name, None]


A, B = "{name: a, master: 'http://a'}", "{name: b, master: 'http://b'}"
POOLS = f"mooncake: {{pools: [{A}, {B}]}}, replicas: "


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (
            f"mooncake: {{pools: [{A}, {{name: a, master: 'http://b'}}]}}",
            "mooncake.pools[1].name",
            "'a' is already mooncake",
        ),
        (
            f"mooncake: {{pools: [{A}, {{name: b, master: 'http://a/'}}]}}",
            "mooncake.pools[1].master",
            "[0].master",
        ),
        (
            f"mooncake: {{pools: [{A}, {{name: b, master: 'b:1'}}]}}",
            "mooncake.pools[1].master",
            "http://HOST:PORT",
        ),
        (
            f"mooncake: {{pools: [{A}, 'b=http://b']}}",
            "mooncake.pools[1]",
            "must be a mapping, not 'b=http://b'",
        ),
        (
            "mooncake: {pools: [{name: 'x y', master: 'http://a'}]}",
            "mooncake.pools[0].name",
            "letters, digits",
        ),
        (
            "mooncake: {pools: [{name: a, url: 'http://a'}]}",
            "mooncake.pools[0].url",
            "allowed: name",
        ),
        (f"mooncake: {{pools: [{A}], master: 'http://b'}}", "mooncake.master", "one of them"),
        (POOLS + "['http://r']", "replicas[0].pool", "several pools; write a, b, or false"),
        (
            POOLS + "[{url: 'http://r', pool: c}]",
            "replicas[0].pool",
            "pool 'c'; write a, b, or f",
        ),
        (POOLS + "[{url: 'http://r', pool: a}]", "mooncake.pools[1].name", "no replica is in 'b'"),
        (
            "mooncake: {master: 'http://a'}, replicas: [{url: 'http://r', pool: c}]",
            "replicas[0].pool",
            "true or false: no pool has a name",
        ),
        ("replicas: [{url: 'http://r', pool: c}]", "replicas[0].pool", "pool 'c'"),
        (
            "replicas: [{url: 'http://r', pool_layout: 'm@tp_rank:x'}]",
            "replicas[0].pool_layout",
            "'tp_rank:x' is not a layout field; write e.g. tp_rank:0-3",
        ),
        (
            POOLS + "[{url: 'http://r', pool: a, role: prefill},"
            " {url: 'http://s', pool: b, role: decode}]",
            "replicas[0].role",
            "set role: decode for another replica with transfer store in pool a, or",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(tmp_path: Path, text: str, key: str, said: str) -> None:
    """Naming the key and what is allowed there."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, f"{{{text}}}"))
    assert caught.value.param == key
    assert said in caught.value.message


def test_a_pool_s_masters_are_one_setting(tmp_path: Path) -> None:
    """As a text with commas everywhere, and as a list in the file."""
    file = tmp_path / "warmroute.yaml"
    file.write_text("mooncake: {master: ['http://a:1', 'http://b:2']}")

    assert config.load(file).mooncake.master == "http://a:1,http://b:2"
    by_variable = load(environ={"WARMROUTE_MOONCAKE_MASTER": "http://a:1,http://b:2"})
    assert by_variable.mooncake.master == "http://a:1,http://b:2"


# -- where what is wrong was given ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "number", "said"),
    [
        (
            ["listen:", "  host: '::'", "  prot: 1"],
            3,
            "unknown key 'listen.prot'; did you mean 'port'",
        ),
        (["log: {}", "lissen: {}"], 2, "unknown key 'lissen'; did you mean 'listen'"),
        (["mooncake: {poll_s: 2}"], 1, "mooncake.poll_s was removed: it is 1; remove the key"),
        (
            ["limits:", "  websockets: 16"],
            2,
            "limits.websockets was removed: route WebSockets to a replica",
        ),
        (
            ["listen:", "  # a comment", "  port: 99999"],
            3,
            "listen.port: must be at most 65535, not 99999",
        ),
        (["listen:", "  port: many"], 2, "listen.port: must be a number, not 'many'"),
        (["replicas:", "  - http://a:1", "  - url: http://b:1", "    evnts: []"], 4, "'events'"),
        (["replicas:", "  - http://a:1", "  - ftp://b"], 3, "replicas[1].url: 'ftp://b'"),
        (["replicas:", "  - http://a:1", "  - http://a:1"], 3, "is already replicas[0].url"),
        (["policy:", "  name: kv_awre"], 2, "did you mean 'kv_aware'"),
        (["policy:", "  params:", "    alpa: 2"], 3, "did you mean 'alpha'"),
        (["policy:", "  params:", "    alpha: x"], 2, "policy 'kv_aware'"),
        (["redis:", "  lease_s: 0.1"], 2, "redis.lease_s"),
        (["tokens:", "  time_zone: Berlin"], 2, "'Berlin' is not a time zone"),
        (["tokens:", "  start_dates:", "    a/b.c: soon"], 2, "is not YYYY-MM-DD"),
        (["admin:", "  open: true", "  host: 0.0.0.0"], 2, "admin.open"),
    ],
)
def test_what_is_wrong_in_the_file_has_its_line(
    tmp_path: Path, lines: list[str], number: int, said: str
) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text("\n".join(lines))

    with pytest.raises(ConfigError) as error:
        load(file)

    assert error.value.message.startswith(f"{file}:{number}: ")
    assert said in error.value.message


def test_yaml_that_is_none_has_its_line_too(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    for text, said in (
        ("a: 1\nb: [", "line 2: not YAML"),
        ("log: {}\nlog: {}", "line 2: not YAML"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            load(file)
        assert error.value.message.startswith(f"{file}: {said}")


def test_what_is_wrong_in_a_variable_or_a_flag_names_it(tmp_path: Path) -> None:
    """Not the line of the file that it overrules."""
    file = tmp_path / "warmroute.yaml"
    file.write_text("listen: {port: 1}\nreplicas: [http://a:1]")

    with pytest.raises(ConfigError, match=r"^WARMROUTE_LISTEN_PORT: listen\.port: must be"):
        load(file, environ={"WARMROUTE_LISTEN_PORT": "99999"})
    with pytest.raises(ConfigError, match=r"^--replica: replicas\[0\]\.url: 'b' is not a base URL"):
        load(file, flags={("replicas",): ["b"]})


def test_all_errors_of_a_file_come_at_once_with_their_lines(tmp_path: Path) -> None:
    """Types, ranges, unknown keys and addresses; a section without errors is checked, too."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(
        "listen:\n  port: eighty\n  prot: 3\n"
        "replicas: [{url: 'http://a', pool: [1]}, {url: 'http://b', evnts: []}]\n"
        "redis: {password: hunter2, url: 'http://a:1'}\n"
        "tokens: {time_zone: Mars}\nlog: {level: loud}\n"
    )

    with pytest.raises(ConfigErrors) as caught:
        load(file)

    assert sorted(each.message.removeprefix(f"{file}:") for each in caught.value.errors) == [
        "2: listen.port: must be a number, not 'eighty'",
        "3: unknown key 'listen.prot'; did you mean 'port'? "
        f"(allowed: {', '.join(ListenConfig.__struct_fields__)})",
        "4: replicas[0].pool: must be true or false or text, not a list",
        "4: unknown key 'replicas[1].evnts'; did you mean 'events'? "
        f"(allowed: {', '.join(ReplicaConfig.__struct_fields__)})",
        "5: redis.password: not allowed in the file; set WARMROUTE_REDIS_PASSWORD, or name a file "
        "in redis.password_file",
        "6: tokens.time_zone: 'Mars' is not a time zone; write a name such as Europe/Berlin",
        "7: log.level: must be debug, info, warning or error, not 'loud'",
    ]
    assert "hunter2" not in caught.value.message


def test_every_wrong_replica_is_named() -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(flags={("replicas",): ["a", "http://b", "c"]})

    assert [each.param for each in caught.value.errors] == ["replicas[0].url", "replicas[2].url"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "kv_aware:alpha=3",
            "write --policy kv_aware --policy-param alpha=3, or in a file policy: "
            "{name: kv_aware, params: {alpha: 3}}",
        ),
        ("kv_aware:alfa=3", "did you mean 'alpha'? (allowed: alpha); a parameter is written "
         "--policy-param NAME=VALUE"),
        ("kv_awer:alpha=3", "did you mean 'kv_aware'?"),
    ],
)  # fmt: skip
def test_a_policy_with_its_parameters_says_how_to_write_them(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags={("policy", "name"): text})

    assert said in caught.value.message
    assert "--policy-param" in caught.value.message


# -- --set ---------------------------------------------------------------------------------------


def test_set_reads_a_value_as_the_variable_would_and_overrules_it() -> None:
    texts = ("listen.port=2", "hash.seeds=1,2", "events.enabled=false", "tokens.models=a=x,b=y")

    loaded = load(environ={"WARMROUTE_LISTEN_PORT": "1"}, settings=texts)

    assert loaded.listen.port == 2
    assert loaded.hash.seeds == ("1", "2")
    assert not loaded.events.enabled
    assert loaded.tokens.models == {"a": "x", "b": "y"}
    assert load(settings=texts, flags={("listen", "port"): 3}).listen.port == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("redis.ur=x", "--set: unknown key 'redis.ur'; did you mean 'url'?"),
        ("lissen.port=1", "unknown key 'lissen'; did you mean 'listen'?"),
        ("redis=x", "--set: redis: must be a mapping, not 'x'"),
        ("listen.port=x", "--set: listen.port: must be a number, not 'x'"),
        ("mooncake.poll_s=2", "--set: mooncake.poll_s was removed"),
        ("mooncake.pools=a=b", "--set: mooncake.pools"),
        ("port", "--set port: write --set KEY=VALUE"),
        ("=1", "--set =1: write --set KEY=VALUE"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(settings=[text])

    assert caught.value.message.startswith(said)


# -- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("WARMROUTE_LISTEN_PROT", "WARMROUTE_LISTEN_PORT"),
        ("WARMROUTE_PORT", "WARMROUTE_LISTEN_PORT"),  # as the flag is called
        ("WARMROUTE_POLICY", "WARMROUTE_POLICY_NAME"),
        ("WARMROUTE_REPLICA", "WARMROUTE_REPLICAS"),
        ("WARMROUTE_REDIS", "WARMROUTE_REDIS_URL"),
        ("WARMROUTE_LOG_LEVLE", "WARMROUTE_LOG_LEVEL"),
        ("WARMROUTE_REDIS_PASWORD_FILE", "WARMROUTE_REDIS_PASSWORD_FILE"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {name}: did you mean {meant}"):
        load(environ={name: "8080"})


def test_a_variable_like_no_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"WARMROUTE_XYZZY1234567890XX: `warmroute options"):
        load(environ={"WARMROUTE_XYZZY1234567890XX": "1", "PATH": "/bin", "WARM": "x"})


def test_variables_of_other_programs_are_left_to_them() -> None:
    environ = {
        "WARMROUTE_CONFIG": "warmroute.yaml",
        "WARMROUTE_REDIS_PASSWORD": "s3cret",
        "WARMROUTE_KEY": "wr-1",
        "WARMROUTE_VLLM_PYTHON": "/venv/bin/python",
        "WARMROUTE_FUZZ_SECONDS": "60",
        "WARMROUTE_TEST_REQUIRE_SERVERS": "1",
    }

    assert load(environ=environ) == load()


@pytest.mark.parametrize("service", ["WARMROUTE", "WARMROUTE_ADMIN", "WARMROUTE_LISTEN"])
def test_what_kubernetes_sets_for_a_service_is_no_setting(service: str) -> None:
    """Every pod has these of each Service in its namespace, one called `warmroute` among them."""
    environ = {
        f"{service}_SERVICE_HOST": "10.96.0.9",
        f"{service}_SERVICE_PORT": "8080",
        f"{service}_SERVICE_PORT_HTTP": "8080",
        f"{service}_PORT": "tcp://10.96.0.9:8080",
        f"{service}_PORT_8080_TCP": "tcp://10.96.0.9:8080",
        f"{service}_PORT_8080_TCP_PROTO": "tcp",
        f"{service}_PORT_8080_TCP_PORT": "8080",
        f"{service}_PORT_8080_TCP_ADDR": "10.96.0.9",
    }

    assert load(environ=environ) == load()


def test_a_setting_stays_one_beside_a_service() -> None:
    environ = {"WARMROUTE_ADMIN_SERVICE_HOST": "10.96.0.9", "WARMROUTE_ADMIN_PORT": "9000"}

    assert load(environ=environ).admin.port == 9000
