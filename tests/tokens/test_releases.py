"""Prompts by the rules of the engine's release: recorded from vLLM 0.32 and 0.33."""

from __future__ import annotations

import json

import pytest

from loadtest.emulator.options import TINY_MODEL
from router.errors import ClientError
from router.releases import V0_32, V0_33, Release, is_at_least, rules_of
from router.tokens import Prompters, load_prompter
from router.tokens.media_names import MediaItem, name_of
from router.tokens.prompter import Prompter
from tests.tokens.prove_families import ours
from tests.tokens.releases import GOLDEN, cases

RECORDED = {
    release: json.loads((GOLDEN / f"releases-{release[0]}.{release[1]}.0.json").read_text())
    for release in (V0_32, V0_33)
}


@pytest.mark.parametrize("release", [V0_32, V0_33], ids=str)
def test_prompts_are_those_of_the_engines_release(release: Release) -> None:
    """DeepSeek V4.1's tool results, templates with namespaces, mapped efforts of all APIs."""
    wrong = []
    for number, case in enumerate(cases()):
        prompter = load_prompter(
            str(TINY_MODEL),
            chat_template=case.template,
            tokenizer_mode=case.mode,
            local_files_only=True,
            release=release,
        )
        prompter.map_efforts(case.efforts if release >= V0_33 else {})
        try:
            found = ours(prompter, case.body, case.api)
        except ClientError:
            found = None  # the engine refuses it, too
        if found != RECORDED[release][number]:
            wrong.append(case)

    assert wrong == []


def test_the_releases_differ() -> None:
    """Else the recordings would show nothing."""
    assert sum(old != new for old, new in zip(*RECORDED.values(), strict=True)) > 10


def test_a_png_with_a_transparent_colour_is_converted_from_0_33_on() -> None:
    """As recorded; whatever stands before the pixels."""
    head = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + bytes(9) + b"\x02" + bytes(7)
    head = head[:24] + b"\x08\x02" + bytes(7)
    text = (3).to_bytes(4, "big") + b"tEXt" + b"a=b" + bytes(4)
    colour = (6).to_bytes(4, "big") + b"tRNS" + bytes(10)
    pixels = bytes(4) + b"IDAT" + bytes(4)
    item = MediaItem("data:", None)

    def named(data: bytes, release: Release) -> str | None:
        return name_of(item, data, "m", None, release)

    assert named(head + text + pixels, V0_33) == named(head + text + pixels, V0_32)
    assert named(head + text + colour + pixels, V0_33) != named(
        head + text + colour + pixels, V0_32
    )
    assert named(head + text, V0_33) is None
    assert named(head + b"\xff" * 60, V0_33) is None


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", V0_32),
        ("0.33.0", V0_33),
        ("0.33.1rc2.dev5+gabc", V0_33),
        ("1.0", V0_33),
        ("0.17.1", V0_32),
        ("", V0_32),
        (None, V0_32),
        ("dev", V0_32),
    ],
)
def test_a_version_shows_the_rules(version: str | None, release: Release) -> None:
    """One that is not known has the older rules: what differs, the count audit finds."""
    assert rules_of(version) == release
    assert is_at_least(version, V0_33) == (release == V0_33)


def test_a_newer_replica_has_the_model_loaded_again() -> None:
    """Once; the old prompter serves until the new one is there, and an older replica changes
    nothing.
    """
    prompters, old, new = Prompters(), Prompter(None, None), Prompter(None, None)
    assert prompters.start_loading("m", V0_32)
    assert not prompters.start_loading("m", V0_33)
    prompters.finish_loading("m", old)

    assert prompters.start_loading("m", V0_33)
    assert prompters.get("m") is old
    prompters.finish_loading("m", new)

    assert prompters.get("m") is new
    assert not prompters.start_loading("m", V0_32)
    assert not prompters.start_loading("m", V0_33)
