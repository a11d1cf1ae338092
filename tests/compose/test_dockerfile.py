"""The image: linted, small, without rights, and made of what the build context has."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.compose.stacks import DOCKER, ROOT, dockerfile


def test_hadolint_has_nothing_to_say() -> None:
    """Of any severity."""
    folder = Path(sys.executable).parent
    hadolint = shutil.which("hadolint", path=f"{folder}") or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")

    done = subprocess.run(
        [hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False
    )

    assert done.stdout == ""
    assert done.returncode == 0


def test_it_runs_without_rights_and_has_a_health_check() -> None:
    """By number, so that `runAsNonRoot` can check it; healthy is ready."""
    image = dockerfile()

    assert image.of("USER") == ["65534:65534"]
    assert "/readyz" in image.of("HEALTHCHECK")[0]
    assert "WARMROUTE_LISTEN_PORT" in image.of("HEALTHCHECK")[0]
    assert json.loads(image.of("ENTRYPOINT")[0]) == ["warmroute"]
    kinds = [kind for kind, _ in image.last]
    assert kinds.index("USER") > kinds.index("RUN")


def test_it_is_reached_from_outside_of_the_container() -> None:
    """A router's default is loopback. The image's own file says otherwise; yours replaces it."""
    image = dockerfile()
    variables = dict(re.findall(r"(\w+)=(\S+)", image.of("ENV")[0]))
    file = variables["WARMROUTE_CONFIG"]
    (written,) = re.findall(rf'echo "([^"]+)" > {file}', " ".join(image.of("RUN")))

    assert yaml.safe_load(written) == {"listen": {"host": "0.0.0.0"}}
    assert "WARMROUTE_LISTEN_HOST" not in variables  # it would win over a file that says loopback


def test_the_base_is_pinned_and_the_build_stays_behind() -> None:
    """Two stages on one image of one release; only the environment is copied over."""
    image = dockerfile()
    bases = [text.split()[0] for kind, text in image.all if kind == "FROM"]

    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases[0])
    assert image.of("COPY") == ["--from=build /opt/warmroute /opt/warmroute"]


def test_the_context_has_what_is_copied_and_no_more() -> None:
    """Each COPY finds its source past .dockerignore; tests, notes and secrets stay out."""
    lines = (ROOT / ".dockerignore").read_text().split()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for kind, text in dockerfile().all
        if kind == "COPY" and "--from" not in text
        for source in text.split()[:-1]
    }

    assert lines[0] == "**"
    assert copied == let_in
    for source in copied:
        assert (ROOT / source).exists()
    assert any(fnmatch.fnmatch("router/__pycache__", line) for line in lines)


def test_whatever_is_installed_is_pinned_by_hash() -> None:
    """Each pip of the build takes a file of pins or our own wheel; each pin has hashes."""
    runs = [text for kind, text in dockerfile().all if kind == "RUN"]
    pips = [
        step for text in runs for step in text.split("&&") if re.search(r"\bpip .*install ", step)
    ]
    pins = [ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
    pins += sorted(DOCKER.glob("requirements-*.txt"))

    assert len(pips) == 3
    for step in pips[:-1]:
        assert "--require-hashes -r" in re.sub(r"\s+", " ", step)
    assert "--no-deps /wheels/*.whl" in pips[-1]
    assert len(pins) == 6
    for file in pins:
        entries = file.read_text().replace("\\\n", " ").splitlines()
        assert entries
        for entry in entries:
            assert re.match(
                r"[a-z0-9-]+(\[[a-z]+\])?==\S+( .*)? +--hash=sha256:[0-9a-f]{64}", entry
            ), entry


@pytest.mark.parametrize(
    ("built_in", "needed"), [("models", ("harmony", "kimi", "mistral")), ("otel", ("otel",))]
)
def test_what_an_extra_needs_can_be_built_in(built_in: str, needed: tuple[str, ...]) -> None:
    """With EXTRAS=models the image has the libraries of every such extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = (DOCKER / f"requirements-{built_in}.txt").read_text()

    for extra in needed:
        for requirement in extras["optional-dependencies"][extra]:
            name = re.split(r"[^a-z-]", requirement)[0]
            assert re.search(rf"^{name}(\[[a-z]+\])?==", pinned, flags=re.MULTILINE)
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        assert line in pinned


def test_images_can_be_pinned_by_digest(tmp_path: Path) -> None:
    """Of every service and of the base; again, it moves to what the tags have become."""
    for name in ("pin.sh", ".env", "Dockerfile"):
        shutil.copy(DOCKER / name, tmp_path)
    docker = tmp_path / "docker"

    def pinned(digit: str) -> str:
        docker.write_text(f"#!/bin/sh\necho sha256:{digit * 64}\n")
        docker.chmod(0o755)
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run([tmp_path / "pin.sh"], env=path, check=True, capture_output=True)
        return (tmp_path / ".env").read_text() + (tmp_path / "Dockerfile").read_text()

    for digit in "ab":
        text = pinned(digit)
        found = re.findall(r"^(?:\w+_IMAGE=|FROM )(\S+)", text, flags=re.MULTILINE)

        assert len(found) == 8
        for image in found:
            is_ours = image.startswith("warmroute")
            assert is_ours or re.fullmatch(rf"\S+:[\w.-]+@sha256:{digit}{{64}}", image), image
