"""Images get the names that vLLM's own hasher gives them, or none."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tokens.blake3 import blake3_hex
from router.tokens.media_names import MAX_URL_CHARS, MediaItem, name_of

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "media_vectors.json").read_text())
MODEL = VECTORS["model"]
PNG = VECTORS["images"][0]

BLAKE3 = {  # of bytes 0, 1, ... 250, 0, ...: the test vectors of the BLAKE3 team
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    3073: "7124b49501012f81cc7f11ca069ec9226cecb8a2c850cfe644e327d22d3e1cd3",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


@pytest.mark.parametrize("size", BLAKE3)
def test_the_hash_is_blake3(size: int) -> None:
    """Its authors' vectors: no chunk, one, several, a tree with an odd one."""
    assert blake3_hex(bytes(i % 251 for i in range(size))) == BLAKE3[size]


@pytest.mark.parametrize("image", VECTORS["images"], ids=lambda i: f"{i['form']}-{i['mode']}")
def test_an_image_has_the_engines_name(image: dict[str, Any]) -> None:
    """Of every format and mode it is vLLM's; of what is not certain there is none."""
    url = f"data:image/any;base64,{image['data']}"

    name = name_of(MediaItem(url, None), MODEL)

    assert name == (None if image["form"] == "BMP" else image["identifier"])


def test_a_clients_own_name_is_the_name() -> None:
    """A `uuid` is taken as it is, with an image or without."""
    assert name_of(MediaItem(None, "mine"), MODEL) == "mine"
    assert name_of(MediaItem("http://example.org/a.png", "mine"), MODEL) == "mine"


def test_the_model_is_part_of_the_name() -> None:
    """Two models name the same image differently."""
    item = MediaItem(f"data:image/png;base64,{PNG['data']}", None)

    assert name_of(item, MODEL) != name_of(item, "another")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "file:///etc/passwd",
        "data:image/png;base64",
        f"data:image/png,{PNG['data']}",
        f"data:image/png;base64;x=1,{PNG['data']}",
        f"data:image/png;base64,{PNG['data']}\n",
        "data:image/png;base64,%%%",
        "data:image/png;base64,ü",
        "data:image/png;base64,",
        "data:image/png;base64," + "A" * MAX_URL_CHARS,
    ],
    ids=lambda url: url[:40],
)
def test_what_is_not_certain_has_no_name(url: str) -> None:
    """Addresses, what the engine refuses, and what is too large."""
    assert name_of(MediaItem(url, None), MODEL) is None


@pytest.mark.hypothesis
@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBP", b"GIF89a"]),
    st.binary(max_size=64),
)
def test_any_bytes_have_a_name_or_none(head: bytes, rest: bytes) -> None:
    """Broken pictures raise nothing."""
    url = "data:image/png;base64," + base64.b64encode(head + rest).decode()

    name = name_of(MediaItem(url, None), MODEL)

    assert name is None or len(name) == 64


def test_a_jpeg_of_nothing_but_segments_ends() -> None:
    """Of a hostile one only the first thousand segments are read."""
    data = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1_000_000

    assert (
        name_of(MediaItem("data:image/jpeg;base64," + base64.b64encode(data).decode(), None), MODEL)
        is None
    )
