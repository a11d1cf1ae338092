"""Run the tests of what differs from main: `make quick`.

    python -m tests.quick [COMMIT]      against another commit than main

A file's tests are found by its name:

    tests/…/test_x.py                   itself
    tests/ROOM/x.py, conftest.py        all of that room
    tests/x.py                          every test file that imports it
    router/ROOM/…, loadtest/ROOM/…      tests/ROOM, tests/loadtest/ROOM, test_ROOM.py
    router/x.py, loadtest/x.py          test_x.py, as of router/base/x.py
    router/metrics/…                    tests/test_docs.py, which has their tables
    router/observers/NAME/…             tests/observers/NAME
    loadtest/dev/…                      as loadtest/…
    policies/…                          tests/policies
    docker/…                            tests/compose
    *.md                                tests/test_docs.py

Slow tests, those with a deadline of their own (`pytest.mark.timeout`), and tests of real engines
and containers are left out: `make test`, `make test-engines` and `make compose-real` run them, and
so does their name.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parent.parent
NOTHING_LEFT = 5  # pytest's status when every test was left out


def choose(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files and folders of changed files, sorted; those inside a folder once."""
    found = {path for name in changed for path in _tests_of(PurePath(name), root)}
    found = {path for path in found if (root / path).exists()}
    return sorted(str(path) for path in found if not found & set(path.parents))


def _tests_of(path: PurePath, root: Path) -> Iterator[PurePath]:
    package, tests = path.parts[0], PurePath("tests")
    if path.suffix == ".md":
        yield tests / "test_docs.py"
    elif package == "docker":
        yield tests / "compose"
    elif package == "policies":
        yield tests / "policies"
    elif path.parts[:2] in (("tests", "engines"), ("tests", "containers")):
        return
    elif package == "tests" and path.name.startswith("test_"):
        yield path
    elif package == "tests" and len(path.parts) > 2:
        yield path.parent
    elif package == "tests":
        yield from _importers(path.stem, root)
    elif path.parts[:2] == ("router", "metrics"):
        yield tests / "test_docs.py"
    elif path.parts[:2] == ("router", "observers") and len(path.parts) > 3:
        yield tests / "observers" / path.parts[2]
    elif path.parts[:2] == ("router", "base"):
        yield tests / f"test_{path.name}"
    elif path.parts[:2] == ("loadtest", "dev"):
        yield from _tests_of(PurePath("loadtest", *path.parts[2:]), root)
    elif package in ("router", "loadtest") and len(path.parts) > 2:
        yield tests / path.parts[1]
        yield tests / f"test_{path.parts[1]}.py"
        yield tests / "loadtest" / path.parts[1]
        yield tests / "loadtest" / f"test_{path.parts[1]}.py"
    elif package in ("router", "loadtest"):
        yield tests / f"test_{path.name}"
        yield tests / "loadtest" / f"test_{path.name}"


def _importers(helper: str, root: Path) -> Iterator[PurePath]:
    for file in root.glob("tests/**/test_*.py"):
        if f"tests.{helper} import" in file.read_text():
            yield PurePath(file.relative_to(root))


def changed_since(commit: str) -> list[str]:
    """List what differs from where this branch left a commit, untracked files too."""
    base = _git("merge-base", "HEAD", commit)[0]
    return [*_git("diff", "--name-only", base), *_git("ls-files", "-o", "--exclude-standard")]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def main(argv: list[str]) -> int:
    """Run them; return pytest's status."""
    chosen = choose(changed_since(argv[0] if argv else "main"))
    print("pytest", *chosen or ["nothing: no test is named after what has changed"], flush=True)
    if not chosen:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    status = subprocess.run([*command, "-m", "not slow", *chosen], cwd=ROOT, check=False).returncode
    return 0 if status == NOTHING_LEFT else status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
