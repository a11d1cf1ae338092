"""Template arguments and content formats that engines have as flags: recorded from vLLM 0.32."""

from __future__ import annotations

import json

import pytest

from loadtest.emulator.options import TINY_MODEL
from router.api.openai import parse_chat
from router.errors import ClientError
from router.tokens import Prompter, load_prompter
from tests.tokens.prove_families import ours
from tests.tokens.template_defaults import GOLDEN, HEAD, Case, cases

RECORDED: list[str | None] = json.loads(GOLDEN.read_text())


def prompter_of(case: Case) -> Prompter:
    prompter = load_prompter(str(TINY_MODEL), chat_template=case.template, local_files_only=True)
    prompter.set_defaults(case.defaults)
    if case.content_format != "auto":
        prompter.set_content_format(case.content_format)
    return prompter


def test_flags_do_here_what_they_do_in_the_engine() -> None:
    """Chats, Responses and Messages; with own arguments, efforts and tools, over the defaults."""
    wrong = []
    for number, case in enumerate(cases()):
        try:
            found = ours(prompter_of(case), case.body, case.api)
        except ClientError:
            found = None
        if found != RECORDED[number]:
            wrong.append((number, case))

    assert wrong == []


def test_the_flags_make_a_difference() -> None:
    """Else the recording would show nothing."""
    plain = {
        json.dumps([case.api, case.body, str(case.template)]): recorded
        for case, recorded in zip(cases(), RECORDED, strict=True)
        if not case.defaults and case.content_format == "auto"
    }
    changed = [
        plain[json.dumps([case.api, case.body, str(case.template)])] != recorded
        for case, recorded in zip(cases(), RECORDED, strict=True)
    ]

    assert sum(changed) > 60


@pytest.mark.parametrize(
    ("case", "setting"),
    [
        (Case("chat", {}, HEAD, {"enable_thinking": False}), "chat_template_kwargs: {tiny: {"),
        (Case("chat", {}, HEAD, {"reasoning_effort": "low"}), '{"reasoning_effort": "low"}'),
        (Case("chat", {}, HEAD, {}, "string"), "--chat-template-content-format string"),
    ],
)
def test_the_engines_flag_is_guessed_from_its_ids(case: Case, setting: str) -> None:
    """One argument of the template, or the format, with which ours are the engine's."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}] * 2}]}
    theirs = prompter_of(case).chat_ids(parse_chat(body))
    here = prompter_of(Case("chat", {}, HEAD, {}))

    found = [said for said, ids in here.guesses(parse_chat(body), "tiny") if ids == theirs]

    assert len(found) == 1
    assert setting in found[0]
