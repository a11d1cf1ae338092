"""Template arguments and content formats that engines have as flags: recorded from vLLM 0.32."""

from __future__ import annotations

import json

from loadtest.emulator.options import TINY_MODEL
from router.errors import ClientError
from router.tokens import Prompter, load_prompter
from tests.tokens.prove_families import ours
from tests.tokens.template_defaults import GOLDEN, Case, cases

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
