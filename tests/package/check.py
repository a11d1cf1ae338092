"""Build the wheel and the sdist, and use the wheel as a stranger would: `make package`.

    python3 tests/package/check.py                   all of it: a minute and a half
    python3 tests/package/check.py --prepare DIR     only install into DIR what the rest needs
    python3 tests/package/check.py --prepared DIR    the rest, with what DIR has

It needs Python, pip and git, and nothing that the checkout has installed. Wheel and sdist go to
build/dist. The wheel is installed outside the checkout, with the pinned requirements and without
extras, and its commands run in an empty directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "build" / "dist"
PACKAGES = ("router", "policies", "loadtest")
DEVELOPERS = "loadtest/dev/"  # not in the wheel
PLUGINS = ("compare", "redecide", "replay", "report", "simulate", "trace")  # demo, emulate: run
DEADLINE_S = 600.0


class Failed(Exception):
    """A step went wrong; the message says which, and what it printed."""


def main() -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--prepare", type=Path, metavar="DIR")
    chosen.add_argument("--prepared", type=Path, metavar="DIR")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        if args.prepare is not None:
            prepare(args.prepare)
            return 0
        with tempfile.TemporaryDirectory(prefix="warmroute-package-") as scratch:
            environment = args.prepared or Path(scratch) / "environment"
            if args.prepared is None:
                prepare(environment)
            wheel = build(environment.resolve(), Path(scratch))
            use(environment.resolve() / "bare", wheel, Path(scratch))
    except Failed as failure:
        print(f"package: FAILED: {failure}", file=sys.stderr)
        return 1
    print(f"package: wheel and sdist are good, after {time.monotonic() - started:.0f} s: {DIST}")
    return 0


def prepare(folder: Path) -> None:
    """Install the tools that build, and a bare environment with the pinned requirements."""
    say("install tools and pinned requirements")
    pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile")
    pinned = (*pip, "--require-hashes", "-r")
    for name in ("tools", "bare"):
        run([sys.executable, "-m", "venv", folder / name])
    tools, bare = (folder / name / "bin/python" for name in ("tools", "bare"))
    run([tools, *pinned, ROOT / "docker/requirements-build.txt"])
    run([tools, *pip, "build", "twine"])
    run([bare, *pinned, ROOT / "requirements.txt"])


def build(environment: Path, scratch: Path) -> Path:
    """Build both from a copy of the tracked files; check what is in them; return the wheel."""
    say("build wheel and sdist")
    source = scratch / "source"
    names = tracked()
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    shutil.rmtree(DIST, ignore_errors=True)
    tools = environment / "tools/bin/python"
    builder = (tools, "-m", "build", "--no-isolation")
    run([*builder, "--sdist", "--wheel", "-o", DIST, source])
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run([tools, "-m", "twine", "check", "--strict", wheel, sdist])
    packed = {name for name in names if name.split("/")[0] in PACKAGES}
    require_packed(wheel, {name for name in packed if not name.startswith(DEVELOPERS)})

    say("build a wheel from the sdist and compare it")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "unpacked", filter="data")
    (unpacked,) = (scratch / "unpacked").iterdir()
    run([*builder, "--wheel", "-o", scratch / "again", unpacked])
    require_equal(wheel, scratch / "again" / wheel.name)
    return wheel


def tracked() -> list[str]:
    """Return the files that git tracks, as far as they are there."""
    names = run(["git", "-C", ROOT, "ls-files", "-z"]).split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def require_packed(wheel: Path, expected: set[str]) -> None:
    """Require that a wheel has every tracked file of the packages, data too, and no other."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    if expected - packed:
        raise Failed(f"not in the wheel (package-data?): {sorted(expected - packed)}")
    if packed - expected:
        raise Failed(f"in the wheel, but not tracked: {sorted(packed - expected)}")


def require_equal(wheel: Path, other: Path) -> None:
    """Require that two wheels have the same files with the same bytes."""
    first, second = records(wheel), records(other)
    differing = {line.split(",")[0] for line in first ^ second}
    if differing:
        raise Failed(f"the wheel from the sdist differs in: {sorted(differing)}")


def records(wheel: Path) -> set[str]:
    """Return the lines of a wheel's RECORD: name, hash, size."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        return set(archive.read(name).decode().splitlines())


def use(bare: Path, wheel: Path, scratch: Path) -> None:
    """Install the wheel; run its commands in an empty directory, with an empty home."""
    say("install the wheel into a bare environment")
    python = bare / "bin/python"
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel])
    run([python, "-m", "pip", "check"])
    for name in ("empty", "home"):
        (scratch / name).mkdir()
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    commands = Commands(
        bare / "bin/warmroute",
        scratch / "empty",
        {"PATH": f"{bare}/bin:/usr/bin:/bin", "HOME": str(scratch / "home"), **kept},
    )
    say("--version and --help")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if (said := commands.run("--version")) != f"warmroute {version}\n":
        raise Failed(f"--version says {said!r}, pyproject.toml {version!r}")
    for name in ("serve", *PLUGINS):
        commands.run(name, "--help")
    say("demo --short")
    print("\n".join(commands.run("demo", "--short", "-o", "demo").rstrip().splitlines()[-12:]))
    route(commands)


class Commands:
    """The installed `warmroute`, in one directory and with one set of variables."""

    def __init__(self, program: Path, cwd: Path, variables: dict[str, str]) -> None:
        self._program = program
        self._cwd = cwd
        self._variables = variables

    def run(self, *args: str) -> str:
        """Run a command to its end; return what it printed."""
        return run([self._program, *args], cwd=self._cwd, env=self._variables)

    @contextmanager
    def running(self, *args: str, ready: str) -> Iterator[None]:
        """Start a command, wait until a URL answers 200; end it and require status 0."""
        log = self._cwd / f"{args[0]}-{ready.split(':')[2].split('/')[0]}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [self._program, *args], cwd=self._cwd, env=self._variables,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            wait_for(ready, process, log)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                status = process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        if status != 0:
            raise Failed(f"warmroute {' '.join(args)} ended with {status}:\n{log.read_text()}")


def route(commands: Commands) -> None:
    """Start two emulated replicas and a router; send requests, and let `check` judge them."""
    say("emulate, serve, one request, check")
    port, admin, *others = (str(port) for port in free_ports(4))
    replicas = [f"http://127.0.0.1:{other}" for other in others]
    options = [
        *(arg for url in replicas for arg in ("--replica", url)),
        *("--host", "127.0.0.1", "--port", port, "--admin-port", admin),
    ]
    with ExitStack() as stack:
        for other, url in zip(others, replicas, strict=True):
            started = commands.running("emulate", "--port", other, ready=f"{url}/health")
            stack.enter_context(started)
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(commands.running("serve", *options, ready=f"{url}/readyz"))
        (first, _), (second, num_cached) = (ask(url) for _ in range(2))
        if first != second or not num_cached:
            raise Failed(f"a prompt went to {first}, again to {second} with {num_cached} cached")
        print(f"the prompt went to {first} twice, the second time with {num_cached} cached tokens")
        print(f"check: {commands.run('check', *options).rstrip().splitlines()[-1]}")


def ask(url: str) -> tuple[str | None, int]:
    """Send one chat; return the replica that answered, and the engine's count of cached tokens."""
    message = {"role": "user", "content": "Which replica has this prompt in its cache? " * 20}
    body: dict[str, Any] = {"model": "tiny", "messages": [message], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            replica = answer.headers["x-warmroute-replica"]
            details = json.load(answer)["usage"]["prompt_tokens_details"] or {}
    except urllib.error.HTTPError as error:
        raise Failed(f"a chat got {error.code}: {error.read().decode()}") from error
    return replica, details.get("cached_tokens") or 0


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a process answers 200 at a URL."""
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:  # HTTPError is one
            time.sleep(0.1)
    raise Failed(f"nothing answers 200 at {url}:\n{log.read_text()}")


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def run(
    command: Sequence[str | Path], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Run a program; return its standard output.

    Raises:
        Failed: it ended with another status than 0, or not in time.
    """
    shown = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, check=False,
            timeout=DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{shown} did not end within {DEADLINE_S:.0f} s") from late
    if done.returncode != 0:
        raise Failed(f"{shown} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def say(step: str) -> None:
    print(f"== {step}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
