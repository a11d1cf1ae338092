"""Prompts follow the engine's flags and release: recorded from vLLM 0.32 and 0.33."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from loadtest.emulator.options import TINY_MODEL
from router.base.engines import V0_32, V0_33, Release, is_at_least, rules_of
from router.base.errors import ClientError
from router.tokens import Prompter, load_prompter
from tests.tokens.engine_flags import DEFAULTS, GOLDEN, Case, default_cases, release_cases
from tests.tokens.prove_families import ours

RECORDED = {
    release: json.loads((GOLDEN / f"releases-{release[0]}.{release[1]}.0.json").read_text())
    for release in (V0_32, V0_33)
}


def _wrong(
    cases: Sequence[Case], recorded: Sequence[str | None], release: Release
) -> list[tuple[int, Case]]:
    """List the cases whose prompt is not the recorded one."""
    wrong = []
    for number, case in enumerate(cases):
        try:
            found = ours(_prompter(case, release), case.body, case.api)
        except ClientError:
            found = None  # the engine refuses it, too
        if found != recorded[number]:
            wrong.append((number, case))
    return wrong


def _prompter(case: Case, release: Release) -> Prompter:
    prompter = load_prompter(
        str(TINY_MODEL),
        chat_template=case.template,
        tokenizer_mode=case.mode,
        local_files_only=True,
        release=release,
    )
    prompter.renderer.efforts = case.efforts if release >= V0_33 else {}
    prompter.renderer.defaults = dict(case.defaults) or None
    if case.content_format != "auto":
        prompter.renderer.use_format(case.content_format)
    return prompter


@pytest.mark.parametrize("release", [V0_32, V0_33], ids=str)
def test_prompts_are_those_of_the_engines_release(release: Release) -> None:
    """DeepSeek V4.1's tool results, templates with namespaces, mapped efforts of all APIs."""
    assert _wrong(release_cases(), RECORDED[release], release) == []


def test_flags_do_here_what_they_do_in_the_engine() -> None:
    """Chats, Responses and Messages; with own arguments, efforts and tools, over the defaults."""
    assert _wrong(default_cases(), json.loads(DEFAULTS.read_text()), V0_32) == []


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
def test_a_version_decides_the_rules(version: str | None, release: Release) -> None:
    """An unknown version has the older rules: the audit of counts detects differences."""
    assert rules_of(version) == release
    assert is_at_least(version, V0_33) == (release == V0_33)
