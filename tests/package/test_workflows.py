"""The workflow files: what they run exists, and they may do no more than they need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.package.notes import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def _load(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    return workflow


def _commands(workflow: dict[str, Any]) -> str:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return "\n".join(step.get("run", "") for step in steps)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(path: Path) -> None:
    """Its targets are in the Makefile, and its scripts where it says."""
    commands = _commands(_load(path))
    makefile = (ROOT / "Makefile").read_text()

    targets = re.findall(r"\bmake ([a-z-]+)", commands)
    files = re.findall(r"(?:tests|docker|\.ci)/[\w./-]+", commands)

    assert files
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
    assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_unless_a_job_says_more(path: Path) -> None:
    """And no job runs for ever."""
    workflow = _load(path)

    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


def test_nothing_is_published_before_package_and_image_are_tested() -> None:
    """Whatever may write waits for both; the tag is compared before anything is built."""
    jobs = _load(ROOT / ".github/workflows/release.yml")["jobs"]
    runs = [step["run"] for step in jobs["package"]["steps"] if "run" in step]
    writing = {name for name, job in jobs.items() if "permissions" in job}

    assert "tests/package/notes.py" in runs[0]
    assert "make package" in runs
    assert writing == {"publish-package", "publish-image", "release"}
    for name in writing - {"release"}:
        assert set(jobs[name]["needs"]) == {"package", "image"}
    assert jobs["release"]["needs"] == "publish-package"


def test_every_python_that_is_claimed_is_tested() -> None:
    """A classifier is a promise: one of CI's two jobs runs the wheel with that release."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = {name for line in classifiers for name in re.findall(r":: Python :: (3\.\d+)", line)}
    jobs = _load(ROOT / ".github/workflows/ci.yml")["jobs"]
    set_up = {
        step["with"]["python-version"] for step in jobs["ci"]["steps"] if "python" in str(step)
    }

    assert claimed == set_up | set(jobs["package"]["strategy"]["matrix"]["python-version"])
