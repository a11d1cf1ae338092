"""What the documentation says is so: commands run, generated parts are new, names exist."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import click
import pytest
import yaml
from hypothesis import given

from docs.site_hooks import PAGES as OUTSIDE
from loadtest.dev import address, docs
from loadtest.dev.chaos.cli import main as chaos
from loadtest.dev.league import cli as league
from policies import POLICIES, Policy, Snapshot, create
from policies.cost import KvAware
from router import config
from router.cli import main
from router.index.candidate_stream import StreamCounters
from router.records.record import CAUSES, Outcome, Part
from tests.docs_blocks import (
    ENGINE_PORTS,
    MODEL,
    REDIS_PORT,
    ROOT,
    ROUTER_PORT,
    VLLM_FLAGS,
    Block,
    Shell,
    blocks,
    free_ports,
)
from tests.engines.aiperf import BLOCK_SIZE, MOONCAKE, profile_words
from tests.forks import python_command
from tests.policies.snapshots import snapshots
from tests.redis_servers import RedisServer, binary

DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text() for path in docs.documents()}
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, text in DOCUMENTS.items()
    for number, block in enumerate(blocks(text))
]
PAGES = [name for name in DOCUMENTS if name.startswith("docs/")]
NOT_FOR_USERS = ("docs/research/", "docs/contribute/")
RUNNABLE = [name for name, text in DOCUMENTS.items() if any(b.runs for b in blocks(text))]

# Source: vllm serve --help, 0.33.0; the installed release does not have them
NEWER_VLLM_FLAGS = frozenset({"--reasoning-effort-map"})
# Source: mooncake_master --help, 0.3.13; redis-server takes its directives as flags
MASTER_FLAGS = frozenset(
    {
        "--eviction_high_watermark_ratio",
        "--metrics_port",
        "--rpc_port",
        "--enable_kv_events",
        "--enable_offload",
    }
)
# Source: aiperf synthesize agentic-code --help, 0.13.0; the others are run in tests/engines
AIPERF_FLAGS = frozenset({"--max-isl", *profile_words("", Path(), MOONCAKE, 1)})
REDIS_FLAGS = frozenset({"--maxmemory", "--maxmemory-policy", "--save"})
# Source: --help of docker compose, docker build, kubectl, helm; promtool and openssl have none here
DOCKER_FLAGS = frozenset(
    {
        "--build",
        "--build-arg",
        "--from-literal",
        "--force-recreate",
        "--network",
        "--no-deps",
        "--profile",
        "--pull",
        "--rm",
        "--set",
        "--wait",
    }
)
HOSTS = {
    "0.0.0.0", "127.0.0.1", "HOST", "10.0.0.5", "10.0.0.6", "engine-1", "engine-2",
    "kubernetes.default.svc",
}  # fmt: skip


def of_language(*languages: str) -> list[object]:
    return [param for param in BLOCKS if param.values[0].language in languages]


# -- what runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, int]]:
    """Two emulated replicas at the ports of the documents, and a Redis, for all of them."""
    chosen = free_ports()
    redis = RedisServer(binary("6.2"), tmp_path_factory.mktemp("redis")).start()
    chosen[REDIS_PORT] = redis.port
    with ExitStack() as stack:
        stack.callback(redis.stop)
        shell = stack.enter_context(Shell(tmp_path_factory.mktemp("engines"), chosen))
        for port in ENGINE_PORTS:
            own = str(chosen[port])
            emulate = ["-m", "loadtest.emulator", "--port", own, "--served-model-name", MODEL]
            command = [*python_command(), *emulate, "--block-size", "32", "--preset", "instant"]
            shell.launch(command)
        for port in ENGINE_PORTS:
            shell.wait(f"http://127.0.0.1:{chosen[port]}/health")
        yield chosen


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("curl") is None, reason="the documents use curl")
@pytest.mark.parametrize("name", RUNNABLE)
def test_commands_run(name: str, ports: dict[int, int], tmp_path: Path) -> None:
    """Every block that is marked as runnable succeeds, in order, and so does what it asks for."""
    fresh = free_ports() | {port: ports[port] for port in (*ENGINE_PORTS, REDIS_PORT)}

    with Shell(tmp_path, fresh) as shell:
        said = [shell.run(block) for block in blocks(DOCUMENTS[name]) if block.runs]
        said.append(shell.log)

    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize("block", of_language("sh", "console"))
def test_every_command_is_run_or_says_why_not(block: Block) -> None:
    """No command block goes unmarked, and backgrounds name what to wait for."""
    assert block.marker is not None, block.code
    assert block.runs or block.marker.startswith("not run: ")
    assert block.marker == "run" or block.shows or block.until or not block.runs


def test_the_quick_start_page_prints_commands_that_the_engine_suite_runs() -> None:
    """Its engines are those of the README with another model, and Claude Code starts as there."""
    model = "vllm serve Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8", "--tool-call-parser qwen3_coder"
    small = f"vllm serve {MODEL}", "--tool-call-parser hermes --reasoning-parser qwen3"
    page = {
        block.code.replace(model[0], small[0]).replace(model[1], small[1])
        for block in blocks(DOCUMENTS["docs/get-started/two-gpus.md"])
    }
    readme, agents = (blocks(DOCUMENTS[name]) for name in ("README.md", "docs/guides/agents.md"))
    engines = {block.code for block in readme if "vllm serve" in block.code}
    claude = {block.code for block in agents if "ANTHROPIC_BASE_URL=" in block.code}

    assert (len(engines), len(claude)) == (2, 1)
    assert engines | claude <= page


@pytest.mark.parametrize("block", of_language("yaml"))
def test_yaml_is_a_valid_configuration(block: Block, tmp_path: Path) -> None:
    """Every YAML block is accepted by the router's own loader, its policy too."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(block.code)

    loaded = config.load(file)

    assert create(loaded.policy.name, loaded.policy.params).name == loaded.policy.name


@pytest.mark.parametrize("block", of_language("python"))
def test_python_compiles(block: Block) -> None:
    """Every Python block is Python, run or not."""
    compile(block.code, "block", "exec")


@pytest.mark.parametrize("block", of_language("toml"))
def test_toml_parses(block: Block) -> None:
    """Every TOML block is TOML."""
    assert tomllib.loads(block.code)


@cache
def own_policy() -> Policy:
    """Execute the example of docs/guides/own-policy.md."""
    code = next(
        b.code for b in blocks(DOCUMENTS["docs/guides/own-policy.md"]) if b.language == "python"
    )
    before = dict(POLICIES)
    try:
        exec(compile(code, "my_policy.py", "exec"), {"__name__": "my_policy"})
        name = (POLICIES.keys() - before.keys()).pop()
        return POLICIES[name]()
    finally:
        POLICIES.clear()
        POLICIES.update(before)


@given(snapshots())
def test_the_example_policy_keeps_the_rules(snapshot: Snapshot) -> None:
    """The documented policy is pure and chooses among those offered."""
    decision = own_policy().decide(snapshot)

    assert decision == own_policy().decide(snapshot)
    assert decision.candidate in [replica.id for replica in snapshot.replicas]


# -- what is generated ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_generated_parts_are_up_to_date(name: str) -> None:
    """`make docs` would change nothing."""
    assert docs.fill(DOCUMENTS[name], docs.MAKERS) == DOCUMENTS[name], "run `make docs`"


# -- what is named -------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """Name a heading's anchor as forges do."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(name: str) -> set[str]:
    return {slug(found) for found in re.findall(r"^#+ (.+)$", DOCUMENTS[name], re.MULTILINE)}


def navigation() -> Iterator[str]:
    """Yield the pages that the site's navigation lists."""
    parts = [yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            yield part
        else:
            parts.extend(part if isinstance(part, list) else part.values())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    """Every relative link names a file that is there, every anchor a heading in it."""
    prose = re.sub(r"^```.*?^```$", "", DOCUMENTS[name], flags=re.MULTILINE | re.DOTALL)

    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if urlsplit(target).scheme:
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        linked = str(path.resolve().relative_to(ROOT))
        assert path.exists(), f"{name}: {target}"
        if anchor and linked in DOCUMENTS:
            assert anchor in anchors(linked), f"{name}: {target}"


def test_the_navigation_names_every_page() -> None:
    """mkdocs.yml lists each page of docs/ once, and README.md links the first."""
    pages = {str(Path(name).relative_to("docs")) for name in PAGES}
    named = list(navigation())

    assert len(named) == len(set(named))
    assert set(named) - set(OUTSIDE.values()) == pages
    assert "(docs/index.md)" in DOCUMENTS["README.md"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_a_title_and_a_sentence(name: str) -> None:
    """A page has one title, and below it a sentence that says what the page is for."""
    title, first, *_ = [line for line in DOCUMENTS[name].splitlines() if line]

    assert title.startswith("# ")
    assert re.match(r"[A-Z`*]", first), first


def test_user_pages_stay_short() -> None:
    """What users read has at most 35,000 words; research and contributors' pages do not count."""
    texts = [DOCUMENTS[name] for name in PAGES if not name.startswith(NOT_FOR_USERS)]

    words = [word for text in texts for word in text.split() if re.search(r"\w", word)]

    assert len(words) <= 35_000


def today(name: str) -> str:
    """Return a document without what it says was removed."""
    text = re.sub(r"^Removed since\. At commit .*$", "", DOCUMENTS[name], flags=re.MULTILINE)
    return re.sub(r"^### Removed\n.*?(?=^##|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_modules_exist(name: str) -> None:
    """Paths and modules of this repository that a document names are there."""
    text = today(name)

    for path in re.findall(
        r"(?<![\w/.])(?:router|policies|loadtest|tests|docs|docker)/[\w./@-]+", text
    ):
        path = path.rstrip(".")
        assert (ROOT / path).exists(), f"{name}: {path}"
    for module in re.findall(r"python -m ((?:router|loadtest)[\w.]*)", text):
        assert importlib.util.find_spec(module) is not None, f"{name}: {module}"
    for dotted in re.findall(r"`((?:router|policies|loadtest)\.[a-z_.]+)`", text):
        parts = dotted.split(".")
        parent = ROOT.joinpath(*parts[:-1])
        is_module = ROOT.joinpath(*parts).exists() or (parent / f"{parts[-1]}.py").exists()
        holder = parent.with_suffix(".py")
        is_name = holder.exists() and re.search(rf"\b{parts[-1]}\b", holder.read_text())
        assert is_module or is_name, f"{name}: {dotted}"


def commands() -> Iterator[click.Command]:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            yield from command.commands.values()


@cache
def flags() -> frozenset[str]:
    """Every long flag of our commands, modules and of vLLM that a document may name."""
    known = {"--help", "--version", *VLLM_FLAGS, *NEWER_VLLM_FLAGS}
    known |= {*MASTER_FLAGS, *REDIS_FLAGS, *DOCKER_FLAGS, *AIPERF_FLAGS}
    for command in (*commands(), chaos):
        for parameter in command.params:
            known.update((*parameter.opts, *parameter.secondary_opts))
    for parser in (docs.argument_parser(), league.parser()):
        known.update(flag for action in parser._actions for flag in action.option_strings)
    return frozenset(known)


def test_the_aiperf_page_has_the_command_that_the_suite_runs() -> None:
    """With the defaults of AIPerf's own sessions: their blocks have 512 tokens."""
    [code] = [
        block.code.replace("\\\n", "")
        for block in blocks(DOCUMENTS["docs/evaluate/aiperf.md"])
        if " profile " in block.code
    ]
    url, dataset = f"http://127.0.0.1:{ROUTER_PORT}", Path("sessions/*/dataset.jsonl")

    ours = profile_words(url, dataset, MOONCAKE, 40)

    exchanged = {"tiny": MODEL, str(BLOCK_SIZE): "512"}
    assert shlex.split(code)[1:] == [exchanged.get(word, word) for word in ours]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_flags_exist(name: str) -> None:
    """Every flag in a document is one of ours or of vLLM's."""
    code = " ".join(
        [*re.findall(r"`([^`\n]+)`", today(name))]
        + [block.code for block in blocks(today(name)) if block.language == "sh"]
    )

    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", code))

    assert named <= flags()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_keys_variables_and_make_targets_exist(name: str) -> None:
    """Configuration keys, WARMROUTE_ variables and make targets are real."""
    text = today(name)
    options = list(config.options())
    keys = {".".join(option.path) for option in options}
    sections = "|".join({option.path[0] for option in options} - {"replicas"})
    variables = {option.variable for option in options}
    variables |= {"WARMROUTE_CONFIG", "WARMROUTE_VLLM_PYTHON", "WARMROUTE_KEY"}
    variables |= {config.REDIS_PASSWORD, config.ADMIN_TOKEN, config.ADMIN_URL}
    variables.add("WARMROUTE_COMPLETE")  # click's, with a _ before it
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert set(re.findall(rf"`((?:{sections})\.[a-z_]+)`", text)) <= keys
    assert set(re.findall(r"WARMROUTE_[A-Z_]+[A-Z]", text)) <= variables
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_metrics_and_headers_exist(name: str) -> None:
    """Metrics and response headers that a document names are exported and sent."""
    text = today(name)
    exported = set(re.findall(r"`(warmroute_\w+)`", docs.metric_tables()))
    files = [*(ROOT / "router/request").glob("*.py"), *(ROOT / "router/http").glob("*.py")]
    files.append(ROOT / "router/scheduling/order.py")
    sources = [file.read_text() for file in files]

    for metric in set(re.findall(r"\bwarmroute_[a-z]\w*", text)):
        base = re.sub(r"_(bucket|sum|count)$", "", metric)
        assert exported & {metric, base, f"{metric}_total"}, f"{name}: {metric}"
    for header in set(re.findall(r"\bx-warmroute-[a-z-]+", text)):
        assert any(header in source for source in sources), f"{name}: {header}"


def test_tables_are_complete() -> None:
    """What is listed by hand lists everything: policies, event kinds, outcomes, log fields."""
    listed = DOCUMENTS["docs/reference/every-metric.md"] + DOCUMENTS["docs/reference/records.md"]
    kinds = list(StreamCounters().by_name())
    record = (ROOT / "router/observers/log/__init__.py").read_text()
    logged = set(re.findall(r'^ {8,20}"(\w+)":', record, re.MULTILINE)) - {"fields"}

    assert logged
    for name in (*kinds, *(outcome.value for outcome in Outcome), *logged):
        assert f"`{name}`" in listed, name
    for name in POLICIES:
        assert f"### `{name}`" in DOCUMENTS["docs/reference/policies.md"], name


def test_every_cause_is_explained_and_watched() -> None:
    """The page has each cause and part; alert and dashboard count what the session had before."""
    page = DOCUMENTS["docs/operate/recomputed.md"]
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    before = set(CAUSES) - {"new", "last_block", "unknown"}
    watched = re.compile(r"cause=~\\?\"(changed[\w|]+)")

    assert rows == [*CAUSES, *rows[len(CAUSES) :]]
    assert set(rows[len(CAUSES) :]) == set(get_args(Part))
    for file in ("prometheus/alerts.yml", "grafana/dashboards/warmroute.json"):
        (found,) = set(watched.findall((ROOT / "docker" / file).read_text()))
        assert set(found.split("|")) == before, file


def test_the_formula_is_the_policys() -> None:
    """The formula of kv_aware that is explained by hand is the one in its docstring."""
    formula = (
        "ttft + work x min(alpha x arrivals x (queue + work / 2) / (1 - busy), conversations / 2)"
    )

    assert formula in " ".join((KvAware.__doc__ or "").split())
    assert formula in " ".join(DOCUMENTS["docs/concepts/prices.md"].split())


def test_reasons_are_what_the_router_says() -> None:
    """The reasons that docs/concepts/exactness.md explains are those of the code."""
    files = ("index/candidate_stream.py", "kv_events/stream.py")
    source = "".join((ROOT / "router" / file).read_text() for file in files)
    rows = re.findall(
        r"^\| `([^`]+)` \| (?:BLIND|DEGRADED)", DOCUMENTS["docs/concepts/exactness.md"], re.M
    )

    assert len(rows) >= 8
    for reason in rows:
        for part in reason.split("…%"):
            assert part in source, reason


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_is_of_this_machine(name: str) -> None:
    """No path of the machine it was written on, no host but placeholders."""
    text = DOCUMENTS[name]

    for path in (ROOT, ROOT.parent, Path.home()):
        assert len(path.parts) < 2 or f"{path}/" not in text
    published = urlsplit(address.repository()).hostname
    for host in re.findall(r"(?:https?|tcp)://([\w.-]+)", text):
        assert host in HOSTS | {published}, f"{name}: {host}"
