"""tests.language: which texts are refused, where they are found, and what is no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import language
from tests.language import problems

LONG = " ".join(["word"] * 31)


def messages(text: str) -> list[str]:
    return [message for _, message in problems(text)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It is dear.", '"dear": write expensive, or slow'),
        ("Likewise here.", '"Likewise": write also, or similarly'),
        ("It was *found out* early.", '"found out": write discover, or detect'),
        ("| a | b |\n|---|---|\n| an arm | of late |", '"of late": write recently'),
        ("- a list that lets\n  go", '"lets go": write release, or evict'),
        ("- a list, begun anew", '"anew": write again'),
        ("The mean TBT of it.", '"TBT": write inter-token latency (ITL)'),
        ("[let go](page.md)", '"let go": write release, or evict'),
        (f"{LONG}.", '31 words, at most 30: "word word word word word word …"'),
        (f"Short. {LONG}", '31 words, at most 30: "word word word word word word …"'),
    ],
)
def test_a_problem_is_named_with_what_to_write(text: str, message: str) -> None:
    """Words of the list, in any case and markup, and sentences over 30 words."""
    assert message in messages(text)


@pytest.mark.parametrize(
    "text",
    [
        "Set `arm` and `tbt_ms`, or `let go`.",
        "experiment, arm",
        "A forthcoming army is alike-minded; see arms/README.md.",
        f"```sh\n{LONG}\n```",
        f"    {LONG}",
        f"<!-- {LONG} -->",
        f"One. {' '.join(['word'] * 30)}. Two.",
        f"A list has e.g. {' '.join(['word'] * 20)}:\n\n- {' '.join(['word'] * 20)}",
        "| " + " | ".join(["six words in each table cell"] * 6) + " |\n" + "|---" * 6 + "|",
        f"Run `{LONG}` today.",
        f"Help.\n\n\b\n{LONG}\n",
    ],
)
def test_what_is_fine_is_not_refused(text: str) -> None:
    """Code, parts of words, label names, cells and items on their own."""
    assert messages(text) == []


def test_the_exit_status_says_whether_there_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each problem is a line with its file."""
    monkeypatch.setattr(language, "ROOT", tmp_path)
    (tmp_path / "good.md").write_text("Fine.")
    (tmp_path / "bad.md").write_text("Not fine:\nanew.")

    assert language.main([str(tmp_path / "good.md")]) == 0
    assert language.main([str(tmp_path / "good.md"), str(tmp_path / "bad.md")]) == 1
    assert 'bad.md:2: "anew": write again' in capsys.readouterr().out
