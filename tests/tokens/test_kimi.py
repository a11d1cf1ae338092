"""Kimi's tokenizers: what is read of their code, texts that are hard on them, and their tools."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from router.api.openai import parse_chat
from router.base.system import install_hint
from router.tokens import Prompter, load_prompter
from router.tokens.encoder import text_of
from router.tokens.models.kimi_tools import declare_tools, sort_keys
from tests.tokens.kimi_models import build_model

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory like Kimi K2's."""
    return build_model("kimi-k2", tmp_path)


def _load(model: Path, template: str = "{{ tools | tojson }}") -> Prompter:
    return load_prompter(str(model), chat_template=template, local_files_only=True)


def _ids(prompter: Prompter, text: str) -> list[int]:
    plan = prompter.plan_text(text, add_special_tokens=True)
    return prompter.commit(plan, plan.encode()).ids()


def _rewrite(model: Path, old: str, new: str) -> None:
    path = model / "tokenization_kimi.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class TikTokenTokenizer", "class Other"),
        ("def encode", "def _encode_chat_segments"),
        ("400_000", "100_000"),
        ('pat_str = "|"', "pat_str = BETWEEN"),
        ("num_base_tokens +", "2 * num_base_tokens +"),
        ("num_reserved_special_tokens = 256", "num_reserved_special_tokens = COUNT"),
        ("deep_sort_dict(tools)", "translate(tools)"),
        ("tokenize=False", "thinking=THINKING"),
        ('["<|im_end|>", "[EOT]"]', "names()"),
        ("class", "class class"),
    ],
)
def test_code_that_is_not_known(model: Path, old: str, new: str) -> None:
    """Anything else in the code leaves the model to the engine; it is never run."""
    _rewrite(model, old, new)

    prompter = _load(model)

    assert (prompter.engine_only or "").startswith("code of the tokenizer")


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoTokenizer": ["other/repository--tokenization_kimi.X", None]}},
        {"auto_map": {"AutoTokenizer": ["a.TikTokenTokenizer", "a.Fast"]}},
        {"added_tokens_decoder": {"5000": {"content": "white space"}}},
        {"bos_token": "not there"},
    ],
)
def test_configurations_that_are_not_known(model: Path, change: dict[str, Any]) -> None:
    """Other classes, and special tokens that are none, leave the model to the engine."""
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    assert _load(model).engine_only is not None


def test_a_vocabulary_that_is_none(model: Path) -> None:
    """A broken file leaves the model to the engine."""
    (model / "tiktoken.model").write_text("no vocabulary\n")

    assert _load(model).engine_only is not None


def test_without_the_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert install_hint("kimi") in (_load(model).engine_only or "")


def test_special_tokens_in_a_text(model: Path) -> None:
    """Those that a client typed are tokens like any other; halves of them, and others', are not."""
    prompter = _load(model)
    first = _ids(prompter, "<|im_user|>")[0] - 3

    ids = _ids(prompter, "[BOS]<think></think><|im_middle|><|reserved_token_5|>")

    assert ids[:4] == [first, first + 22, first + 23, first + 17]
    assert len(ids) > 5
    assert _ids(prompter, f"<|reserved_token_{first + 5}|>") == [first + 5]
    assert all(each < first for each in _ids(prompter, "<|im_user <|im_"))


def test_long_runs(model: Path) -> None:
    """What has no white space for 25,000 characters, or is longer than 400,000, is cut there."""
    prompter = _load(model)
    apart = _ids(prompter, "a" * 25_000), _ids(prompter, "a" * 7)

    assert _ids(prompter, "a" * 50_007) == [*apart[0], *apart[0], *apart[1]]
    assert _ids(prompter, "x<|im_end|>" + "a" * 25_007) == [
        *_ids(prompter, "x<|im_end|>"),
        *apart[0],
        *apart[1],
    ]
    assert _ids(prompter, " the" * 100_001) == [
        *_ids(prompter, " the" * 100_000),
        *_ids(prompter, " the"),
    ]


def test_turns_are_cut_where_the_engine_splits(model: Path) -> None:
    """The incremental ids of a growing text are those of the whole."""
    prompter = _load(model)
    text = ""

    for number in range(6):
        text += f"<|im_user|>user<|im_middle|>{'what now? ' * 80}{number}<|im_end|>"
        plan = prompter.plan_text(text, add_special_tokens=False)
        ids = prompter.commit(plan, plan.encode()).ids()
        whole = load_prompter(str(model), chat_template="x", local_files_only=True)

        assert ids == _ids(whole, text)
        assert number == 0 or plan.num_new_chars < 2_000


def test_tools_in_order(model: Path) -> None:
    """The template gets tools with their keys in order, the second time, too."""
    prompter = _load(model)
    tool = {"type": "function", "function": {"parameters": {"z": 1, "b": {}}, "name": "f"}}
    request = parse_chat({"messages": [USER], "tools": [tool]})
    printed = (
        '[{"function": {"description": null, "name": "f", "parameters": {"b": {}, "z": 1}}, '
        '"type": "function"}]'
    )

    assert prompter.renderer.render(request) == [printed]
    assert prompter.renderer.render(request) == [printed]
    assert prompter.renderer.render(request, by_the_book=True) == [printed]


def test_defaults_of_the_code(tmp_path: Path) -> None:
    """What the newer code gives its template is what it gets, unless a request says otherwise."""
    template = "{{ thinking }} {{ preserve_thinking }} {{ tools_ts_str is defined }}"
    prompter = _load(build_model("kimi-k2.5-tools", tmp_path), template)

    first = prompter.renderer.render(parse_chat({"messages": [USER]}))
    assert text_of(first) == "True False False"
    asked = {"messages": [USER], "chat_template_kwargs": {"thinking": False}}
    assert text_of(prompter.renderer.render(parse_chat(asked))) == "False False False"


def test_tools_in_typescript() -> None:
    """Kimi K2.5's declarations: required first, comments, limits, references, nested types."""
    schema = {
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "type": "object",
        "required": ["path"],
        "additionalProperties": False,
        "properties": {
            "at": {"$ref": "#/$defs/Point"},
            "kind": {"enum": ["a", 1, None], "description": "one\n\nof these"},
            "limit": {"type": "integer", "minimum": 1, "default": 10},
            "path": {"type": "string", "pattern": "^/", "minLength": 2},
            "tags": {"type": "array", "items": {"type": "string", "description": "a tag"}},
            "what": {"anyOf": [{"type": "array"}, {"type": ["null", "object"]}]},
        },
    }
    function = {"name": "read", "description": "Reads.", "parameters": schema}

    assert declare_tools([{"type": "function", "function": sort_keys(function)}]) == (
        """# Tools

## functions
namespace functions {
interface Point {
  x?: number
}
// Reads.
type read = (_: {
  // minLength: 2, pattern: ^/
  path: string,
  at?: Point,
  // one

  // of these
  kind?: "a" | 1 | None,
  // minimum: 1
  // Default: 10
  limit?: number,
  tags?: Array<
    // a tag
    string
  >,
  what?: Array<any> | null | {},
  [k: string]: never
}) => any;
}
"""
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/elsewhere"},
        {"$ref": "#/$defs/Missing"},
        {"enum": ["a"], "type": "integer"},
        {"description": "of no type"},
        {"type": ["strange"]},
        {"type": "string", "description": 5},
        "no schema",
    ],
)
def test_tools_that_are_not_declared(schema: Any) -> None:
    """Where the engine's code gives up on a schema, all tools stay in JSON."""
    tool = {"name": "f", "parameters": {"properties": {"a": schema}}}

    assert declare_tools([{"type": "function", "function": tool}]) is None
