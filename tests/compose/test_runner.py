"""The runner starts what a file says, in its order, and names what does not come up."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.compose.model import ComposeError, load
from tests.compose.runner import Image, Stack
from tests.compose.stacks import wait_until

IMAGES = {"python": Image(entrypoint=("python",)), "busybox": Image()}

SERVER = """
name: small
services:
  web:
    image: python:1
    command: [-m, http.server, "8000", --bind, 0.0.0.0, --directory, /srv]
    volumes: ["./www:/srv:ro"]
    environment: {WHO: "http://web:8000", OTHER: "http://lonely:1"}
    healthcheck:
      test: [CMD, python, -c, "import urllib.request as r; r.urlopen('http://localhost:8000/page')"]
    ports: ["127.0.0.1:80:8000"]
    networks: [a]
  after:
    image: busybox:1
    command: [sh, -c, "cp /etc/given /out/copy; sleep 60"]
    depends_on: {web: {condition: service_healthy}}
    volumes: ["./given:/etc/given:ro", "out:/out"]
    networks: [a]
  lonely: {image: "busybox:1", command: [sleep, "60"], networks: [b]}
networks: {a: , b: }
volumes: {out: }
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "compose.yaml").write_text(SERVER)
    (folder / "www").mkdir()
    (folder / "www" / "page").write_text("at http://web:8000, not at web or web:port\n")
    (folder / "given").write_text(
        "ask http://web:8000 from 127.0.0.1, keep /out/x and 127.0.0.11\n"
    )
    return folder / "compose.yaml"


def test_it_runs_as_the_file_says(files: Path, tmp_path: Path) -> None:
    """Addresses, files, order; and what was started is gone afterwards."""
    with Stack(load(files), tmp_path / "stack", IMAGES) as stack:
        stack.up()
        url = stack.published("web", 80)
        page = httpx.get(f"{url}/page", trust_env=False).text
        copy = stack.mounted("after", "/out") / "copy"
        wait_until(lambda: copy.exists() and copy.read_text(), "what the second one wrote")

        web, after = stack.addresses["web"], stack.addresses["after"]
        assert page == f"at http://{web}:8000, not at web or web:port\n"
        assert f"ask http://{web}:8000 from {after}, keep {copy.parent}/x" in copy.read_text()
        assert "127.0.0.11" in copy.read_text()
        assert stack.environment("web")["WHO"] == f"http://{web}:8000"
        # They share no network: Docker would not resolve that name.
        assert stack.environment("web")["OTHER"] == "http://lonely:1"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_what_does_not_come_up_is_named(files: Path, tmp_path: Path) -> None:
    """With the end of its log; and what was started before it is ended."""
    files.write_text(SERVER.replace("-m, http.server", "-c, 'raise SystemExit(9)'"))

    with (
        Stack(load(files), tmp_path / "stack", IMAGES) as stack,
        pytest.raises(ComposeError, match="web has ended"),
    ):
        stack.up()


def test_an_unknown_image_is_named(files: Path, tmp_path: Path) -> None:
    """Nothing is guessed about what an image starts."""
    with (
        Stack(load(files), tmp_path / "stack", {"python": Image()}) as stack,
        pytest.raises(ComposeError, match="image 'busybox:1'"),
    ):
        stack.command("after")
