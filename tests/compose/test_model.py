"""Compose files are read as Compose reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.model import ComposeError, Mount, dotenv, interpolate, load, seconds

BASE = """
services:
  base:
    image: one:1
    command: [serve, --quiet]
    environment: {A: "1", B: "2"}
    volumes: ["./a:/etc/a:ro", "data:/data"]
    depends_on: {other: {condition: service_healthy}}
    healthcheck: {test: [CMD, "true"], interval: 1m30s, retries: 5}
    cap_drop: [ALL]
    networks: [left]
  other:
    image: two:2
    healthcheck: {test: [CMD-SHELL, "exit 0"]}
networks: {left: , right: }
volumes: {data: }
"""


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A ${A}", "1 1"),
        ("${A:-2} ${EMPTY:-2} ${NONE:-2} ${NONE:-}", "1 2 2 "),
        ("${EMPTY-2}|${NONE-2}", "|2"),
        ("${A:+2}|${EMPTY:+2}|${EMPTY+2}", "2||2"),
        ("$$A $$(cat x)", "$A $(cat x)"),
        ("${NONE}|$NONE", "|"),
    ],
)
def test_variables_are_put_in(text: str, expected: str) -> None:
    """All forms of the specification, and `$$` for a dollar."""
    known = {"A": "1", "EMPTY": ""}

    assert interpolate({"k": [text]}, known) == {"k": [expected]}


@pytest.mark.parametrize(
    ("text", "why"), [("${NONE:?say it}", "NONE is required: say it"), ("${A", "invalid")]
)
def test_what_cannot_be_put_in_is_refused(text: str, why: str) -> None:
    """A variable that is required, and what is no variable."""
    with pytest.raises(ComposeError, match=why):
        interpolate({"k": text}, {})


def test_dotenv_is_read_and_refused(tmp_path: Path) -> None:
    """NAME=VALUE with comments; anything else names its line."""
    (tmp_path / ".env").write_text("# why\n\nA=1\nB=\nC=a=b\n")
    assert dotenv(tmp_path / ".env") == {"A": "1", "B": "", "C": "a=b"}
    assert dotenv(tmp_path / "none") == {}

    (tmp_path / ".env").write_text("A=1\nexport B=2\n")
    with pytest.raises(ComposeError, match="line 2"):
        dotenv(tmp_path / ".env")


def test_extends_merges_as_compose_does(tmp_path: Path) -> None:
    """Mappings by key, volumes by target, lists appended; commands replaced."""
    child = """
    services:
      base:
        extends: {file: "base.yaml", service: base}
        command: [other]
        environment: ["B=3"]
        volumes: ["./b:/etc/a:ro"]
        healthcheck: {interval: 2s}
        cap_add: [IPC_LOCK]
        networks: [right]
      other: {extends: {file: base.yaml, service: other}}
    networks: {left: , right: }
    volumes: {data: }
    """
    file = written(tmp_path, child=child, base=BASE)

    service = load(file).services["base"]

    assert (service.image, service.command) == ("one:1", ("other",))
    assert service.environment == {"A": "1", "B": "3"}
    assert service.mounts == (
        Mount(target="/etc/a", source=tmp_path / "b"),
        Mount(target="/data", volume="data"),
    )
    assert service.depends_on == {"other": "service_healthy"}
    assert service.health is not None
    assert (service.health.interval_s, service.health.retries) == (2.0, 5)
    assert service.networks == {"left", "right"}
    assert (service.raw["cap_drop"], service.raw["cap_add"]) == (["ALL"], ["IPC_LOCK"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("services: {a: {extends: {service: a}, image: x:1}}", "a extends itself"),
        ("services: {a: {extends: {service: b}}}", "there is no 'b'"),
        ("services: {a: {image: x:1, depends_on: [b]}}", "depends on 'b'"),
        (
            "services: {a: {image: x:1, depends_on: {b: {condition: service_healthy}}}, "
            "b: {image: x:1}}",
            "waits for b, which has no health check",
        ),
        ("services: {a: {image: x:1, command: serve}}", "write commands as lists"),
        ("services: {a: {image: x:1, volumes: ['data:/data']}}", "'data' is not declared"),
        ("services: {a: {image: x:1, secrets: [key]}}", "'key' is not declared"),
        ("services: {a: {image: x:1, network_mode: host, ports: ['1:1']}}", "no ports"),
        (
            "services: {a: {image: x:1, read_only: true, configs: [c]}}\n"
            "configs: {c: {content: x}}",
            "read_only, and configs 'c' has content",
        ),
        ("services: [", "base.yaml"),
        ("include: [x]", "not understood"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    """With what is wrong, and where."""
    with pytest.raises(ComposeError, match=why):
        load(written(tmp_path, base=text))


def test_durations() -> None:
    """As Go writes them."""
    assert (seconds("1m30s"), seconds("500ms"), seconds("2h")) == (90.0, 0.5, 7200.0)
    with pytest.raises(ComposeError, match="'5 s' is no duration"):
        seconds("5 s")
