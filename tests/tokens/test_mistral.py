"""Mistral's own tokenizers: prompts as Mistral's library makes them, and files it cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import msgspec
import pytest
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from router.api.openai import parse_chat, parse_completion
from router.api.responses import parse_responses
from router.base.errors import TemplateFailed
from router.base.system import install_hint
from router.tokens import NeedsEngine, Prompter, load_prompter
from router.tokens.model_files import ModelFiles
from router.tokens.models import FAMILIES, find_family, mistral, modes
from tests.tokens.mistral_models import build_model
from tests.tokens.vllm_routes import MODEL

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "Once upon"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tekken of version 13."""
    return build_model("mistral-tekken-v13", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def prompter(model: Path) -> Prompter:
    """What makes its prompts."""
    return _load(model)


def _load(model: Path, **options: Any) -> Prompter:
    return load_prompter(str(model), tokenizer_mode="mistral", local_files_only=True, **options)


def _ids(prompter: Prompter, **body: Any) -> list[int]:
    plan = prompter.plan_chat(parse_chat(body))
    return prompter.commit(plan, plan.encode()).ids()


def test_a_final_message_goes_on(prompter: Prompter) -> None:
    """A continued message has no end; what contradicts itself is refused, as the engine does."""
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    ids = _ids(prompter, messages=[USER, ANSWER], **goes_on)

    closed = _ids(prompter, messages=[USER, ANSWER, USER])

    assert closed[: len(ids)] == ids
    assert closed[len(ids)] == 2
    for messages, options in (
        ([USER, ANSWER], {}),
        ([USER, ANSWER], {"continue_final_message": True}),
        ([USER], goes_on),
    ):
        with pytest.raises(TemplateFailed):
            _ids(prompter, messages=messages, **options)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [USER], "chat_template": "x"},
        {"messages": [USER], "truncate_prompt_tokens": 1},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": None}]},
        {"messages": [{"role": "assistant", "tool_calls": {}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ],
)
def test_left_to_the_engine(prompter: Prompter, body: dict[str, Any]) -> None:
    """Nothing is guessed of what few clients send."""
    with pytest.raises(NeedsEngine):
        _ids(prompter, **{"add_generation_prompt": False, **body})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER], "reasoning_effort": "tiny"},
        {"messages": [USER, {"role": "tool", "content": "", "tool_call_id": "abcdefghi"}]},
        {"messages": [USER], "tools": [{**TOOL, "function": {"name": "no such name"}}]},
    ],
)
def test_refusals_are_the_engines(prompter: Prompter, body: dict[str, Any]) -> None:
    """Releases of the library differ in what they refuse, and the engine's may be another."""
    with pytest.raises(NeedsEngine, match="rules"):
        _ids(prompter, **body)


def test_arguments_of_templates_are_refused(prompter: Prompter) -> None:
    """Of the chat route; that is the engine's own rule."""
    with pytest.raises(TemplateFailed):
        _ids(prompter, messages=[USER], chat_template_kwargs={})


def test_disabled_thinking(tmp_path: Path) -> None:
    """Version 15 does something for the effort `none`, 13 does not; others it refuses."""
    asked = msgspec.structs.replace(parse_chat({"messages": [USER]}), is_thinking_disabled=True)

    for name, effort in (("mistral-tekken-v15", "none"), ("mistral-tekken-v13", "low")):
        prompter = _load(build_model(name, tmp_path))
        assert prompter.adapted(asked).reasoning_effort == effort


def test_parts_of_responses(prompter: Prompter) -> None:
    """The Responses route hands over parts for which there is no rule; strings it takes."""
    part = {"type": "input_text", "text": "hi"}

    plan = prompter.plan_chat(parse_responses({"input": [{**USER, "type": "message"}]}))
    assert prompter.commit(plan, plan.encode()).ids() == _ids(prompter, messages=[USER])
    with pytest.raises(NeedsEngine):
        prompter.plan_chat(parse_responses({"input": [{**USER, "content": [part]}]}))


def test_tools_are_checked_once(prompter: Prompter) -> None:
    """The next turn's tools are those of the last; another owner's are its own."""
    body = {"messages": [USER], "tools": [TOOL]}
    request = parse_chat(body)
    asked = mistral.ChatCompletionRequest.from_openai

    with mock.patch.object(mistral.ChatCompletionRequest, "from_openai", side_effect=asked) as made:
        first = prompter.renderer.render(request, owner="a")
        assert made.call_count == 2
        assert prompter.renderer.render(request, owner="a", apart=True) == first
        assert made.call_count == 3
        assert prompter.renderer.render(request, owner="b") == first
        assert made.call_count == 5


def test_texts(prompter: Prompter) -> None:
    """A completion's text begins with the tokenizer's first token, and no text has special ones."""
    plan = prompter.plan_completion(parse_completion({"prompt": "[INST]</s>"}))
    tokens = prompter.commit(plan, plan.encode())

    assert tokens.ids()[0] == 1
    assert min(tokens.ids()[1:]) > 28
    assert prompter.reference.proves(parse_completion({"prompt": "[INST]</s>"}), tokens)
    assert not prompter.writes_text
    assert prompter.encoder.quicken() is not None
    assert not prompter.give_up_fast()


def test_a_text_that_the_tokenizer_gives_up_on(prompter: Prompter) -> None:
    """Its expressions have a limit; the engine is asked, and nothing ends."""
    for failure in (ValueError("Max stack size"), type("PanicException", (BaseException,), {})()):
        with (
            mock.patch.object(Tekkenizer, "encode", side_effect=failure),
            pytest.raises(NeedsEngine),
        ):
            _ids(prompter, messages=[{**USER, "content": f"another {failure!r}"}])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"config": {"version": "v99"}, "vocab": []}', "\0" * 100, "[" * 100_000],
)
def test_broken_files(tmp_path: Path, content: str) -> None:
    """A file that is no tokenizer leaves the prompts to the engine."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tekken.json").write_text(content)

    assert _load(tmp_path).engine_only is not None


def test_without_the_library(model: Path) -> None:
    """Without the extra the engine tokenizes, and the reason names it."""
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert install_hint("mistral") in (_load(model).engine_only or "")


def test_a_directory_without_config_json(model: Path, tmp_path: Path) -> None:
    """Mistral's own format has another file for it."""
    for name in ("params.json", "consolidated.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tekken.json").symlink_to(model / "tekken.json")

    assert load_prompter(str(tmp_path), local_files_only=True).engine_only is None


def test_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a name on the hub, the files decide; if they cannot be listed, the engine does."""
    listed = ["consolidated.safetensors", "tekken.json"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_: listed)

    assert find_family(_on_the_hub()) is FAMILIES[modes.MISTRAL]
    del listed[0]
    assert find_family(_on_the_hub()) is None
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", mock.Mock(side_effect=OSError))
    for offline in (True, False):
        with pytest.raises(NeedsEngine):
            find_family(_on_the_hub(local_files_only=offline))


def _on_the_hub(**options: Any) -> ModelFiles:
    files = ModelFiles("someone/model", **options)
    vars(files).update(config={"architectures": ["MistralForCausalLM"]}, tokenizer_config={})
    return files


def test_system_messages_in_between(model: Path) -> None:
    """By the Messages API they all go to the front, unless the engine's template takes them."""
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"

    for given, wants in ((None, True), (template, False)):
        renderer = _load(model, chat_template=given).renderer
        assert renderer is not None
        assert renderer.wants_system_first() is wants


def test_the_tiny_model_is_none_of_them() -> None:
    """A directory without Mistral's files is none, whatever its architecture."""
    config = {"architectures": ["MistralForCausalLM"]}

    assert modes.find_mode(str(MODEL), config) == modes.HF
