"""The version: pyproject.toml has it, and whatever else names it says the same."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def _tracked(*patterns: str) -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in found.stdout.splitlines()]


def test_the_citation_names_the_version_and_the_authors() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["license"]
    assert [a["name"] for a in citation["authors"]] == [a["name"] for a in PROJECT["authors"]]


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    """Work in progress stands above it, under Unreleased."""
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", _changelog(), flags=re.MULTILINE)

    assert heads[0] == ("Unreleased", "")
    assert heads[1][0] == VERSION
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in heads[1:])
    assert [date for _, date in heads[1:]] == sorted((date for _, date in heads[1:]), reverse=True)


def test_the_changelog_sorts_changes_by_their_kind() -> None:
    """Keep a Changelog has six kinds of changes, and no text without one."""
    kinds = re.findall(r"^### (.+)$", _changelog(), flags=re.MULTILINE)

    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_images_are_tagged_with_the_version() -> None:
    """In the compose files, the manifests and the commands of the documentation."""
    files = _tracked("docker", "docs/*.md", "docs/**/*.md")
    found = {
        (file.name, tag)
        for file in files
        if file.suffix in {".md", ".yaml", ".yml", ".env"} or file.name == ".env"
        for tag in re.findall(r"\bwarmroute:(\d+\.\d+\.\d+)", file.read_text())
    }

    assert len(found) >= 3
    assert {tag for _, tag in found} == {VERSION}, found


def test_the_image_is_labelled_with_the_version_and_the_licence() -> None:
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', dockerfile))

    assert labels["version"] == VERSION
    assert labels["licenses"] == PROJECT["license"]
    assert labels["title"] == PROJECT["name"]
    assert PROJECT["description"].startswith(labels["description"])
    assert labels["vendor"] == PROJECT["authors"][0]["name"]


@pytest.mark.parametrize("chart", _tracked("docker/**/Chart.yaml", "**/Chart.yaml"), ids=str)
def test_a_chart_installs_this_version(chart: Path) -> None:
    assert str(yaml.safe_load(chart.read_text())["appVersion"]) == VERSION


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()
