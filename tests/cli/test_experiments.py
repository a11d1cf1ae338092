"""The commands of `warmroute experiments`, against a whole router."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from router.cli import main
from router.cli.experiments import table
from tests.cli.running import beside
from tests.faults.stage import Engines, chat, on_stage, words

DEFINITION = """
name: alpha
design: switchback
slot_s: 3600
variants:
  - {name: now, policy: kv_aware}
  - {name: greedy, policy: kv_aware, params: {alpha: 0}}
guardrails: {max_error_rate: 0.5}
"""


async def test_an_experiment_is_started_ramped_stopped_and_removed(tmp_path: Path) -> None:
    """Each order shows how it stands then."""
    file = tmp_path / "alpha.yaml"
    file.write_text(DEFINITION)
    async with Engines(1) as engines, on_stage(*engines) as stage:
        none = await beside(stage, "experiments", "list")
        began = await beside(stage, "experiments", "start", str(file))
        await stage.ask(chat(words(1)))
        again = await beside(stage, "experiments", "start", str(file))
        ramped = json.loads(
            (await beside(stage, "experiments", "ramp", "alpha", "greedy=0.1", "--json")).stdout
        )
        raw = json.loads((await beside(stage, "experiments", "list", "--json")).stdout)
        listed = await beside(stage, "experiments", "list", "alpha")
        ended = await beside(
            stage, "experiments", "stop", "alpha", "--variant", "greedy", "--reason", "too slow"
        )
        removed = await beside(stage, "experiments", "remove", "alpha")
        unknown = await beside(stage, "experiments", "stop", "alpha")

    assert none.stdout.startswith("no experiments; start one: warmroute experiments start FILE")
    assert began.exit_code == 0
    assert "alpha: running, switchback, all models" in began.stdout
    assert "greedy" in began.stdout
    assert "kv_aware:alpha=0" in began.stdout
    assert "now (control)" in began.stdout
    assert (again.exit_code, "stop it first" in again.stderr) == (1, True)
    assert {arm["name"]: arm["share"] for arm in ramped["arms"]} == {"now": 0.5, "greedy": 0.1}
    assert raw["experiments"][0]["slot"]["arm"] in ("now", "greedy", None)
    assert "errors 0% of" in listed.stdout
    assert "slot " in listed.stdout
    assert "ended: variant greedy: too slow" in ended.stdout
    assert "stopped" in ended.stdout
    assert removed.stdout == "alpha is removed\n"
    assert (unknown.exit_code, "no experiment 'alpha'" in unknown.stderr) == (1, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a", "variants: is missing"),
        ("name: [", "not YAML"),
        ("- a", "must be a mapping of name, variants, design"),
        ("name: a\nguardrail: {}", "did you mean 'guardrails'?"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_2(text: str, said: str, tmp_path: Path) -> None:
    """Before the router is asked; the file is named."""
    file = tmp_path / "alpha.yaml"
    file.write_text(text)
    result = CliRunner().invoke(main, ["experiments", "start", str(file)])

    assert result.exit_code == 2
    assert result.stderr.startswith(f"warmroute: {file}:")
    assert said in result.stderr


def test_a_wrong_share_is_a_usage_error() -> None:
    """The argument is quoted."""
    result = CliRunner().invoke(main, ["experiments", "ramp", "alpha", "greedy"])

    assert result.exit_code == 2
    assert "'greedy' is not VARIANT=SHARE" in result.stderr


def test_what_two_routers_started_at_once_is_reported() -> None:
    """The one that waits has the other's name; names are no markup."""
    experiment = {
        "name": "a[b]",
        "standing": "running",
        "overruled_by": "first",
        "started_at": 0.0,
        "ended": None,
        "slot": None,
        "arms": [],
        "definition": {"design": "split", "models": ["m"]},
    }
    text = table([experiment])

    assert "a[b]: running, split, m" in text
    assert "waits: 'first' claimed this traffic first" in text
