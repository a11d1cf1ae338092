"""Which models are tokenized here, and which are left to the engine, with a reason."""

from __future__ import annotations

import datetime
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import PreTrainedTokenizerFast

from router.api.openai import parse_chat
from router.base.system import install_hint
from router.tokens import NeedsEngine, Prompter, load_prompter, model_files
from tests.tokens.vllm_routes import MODEL

HELLO = parse_chat({"messages": [{"role": "user", "content": "hello"}]})
WITH_TOOLS = parse_chat(
    {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model to change."""
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__*"))
    return tmp_path / "model"


def _change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def _text(prompter: Prompter, request: Any = HELLO) -> str:
    return prompter.plan_chat(request).data.decode()


def test_directory(model: Path) -> None:
    """A model directory has all that is needed."""
    prompter = load_prompter(str(model))

    assert prompter.engine_only is None
    assert _text(prompter) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["KimiK3ForConditionalGeneration"]}, "renderer kimi_k3"),
        ({"model_type": "internlm2"}, "tokenizer class of internlm2"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_models_of_the_engine(model: Path, config: dict[str, Any], reason: str) -> None:
    """What the engine renders with code of its own is not rendered here."""
    _change(model / "config.json", **config)

    prompter = load_prompter(str(model))

    assert prompter.engine_only is not None
    assert reason in prompter.engine_only
    with pytest.raises(NeedsEngine):
        prompter.plan_chat(HELLO)


def test_gpt_oss(model: Path) -> None:
    """Its chats are rendered by a library; an engine's `/tokenize` makes others of them."""
    _change(model / "config.json", architectures=["GptOssForCausalLM"], model_type="gpt_oss")

    prompter = load_prompter(str(model))

    assert prompter.engine_only is None
    assert prompter.renderer.is_dated
    assert not prompter.asks_engine


def test_gpt_oss_without_the_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats are unknown then, and what to install is said; completions are not concerned."""
    _change(model / "config.json", model_type="gpt_oss")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    prompter = load_prompter(str(model))

    assert install_hint("harmony") in (prompter.engine_only or "")
    assert not prompter.asks_engine
    with pytest.raises(NeedsEngine):
        prompter.plan_chat(HELLO)
    plan = prompter.plan_text("hello", add_special_tokens=True)
    assert prompter.commit(plan, plan.encode()).num_tokens > 0


def test_a_template_with_the_date(model: Path) -> None:
    """It is rendered with the engine's date; a time of day is not known here."""
    dated = load_prompter(str(model), chat_template="{{ strftime_now('%d %b %Y') }}")
    timed = load_prompter(str(model), chat_template="{{ strftime_now('%H:%M') }}")

    for prompter in (dated, timed):
        assert prompter.renderer.is_dated
        prompter.renderer.today = lambda: datetime.date(2026, 3, 1)
    assert _text(dated) == "01 Mar 2026"
    assert dated.renderer.render(HELLO, by_the_book=True) == ["01 Mar 2026"]
    with pytest.raises(NeedsEngine):
        timed.plan_chat(HELLO)


def test_mistral_format(model: Path) -> None:
    """Mistral's own files, together, make the engine take Mistral's own tokenizer."""
    _change(model / "config.json", architectures=["MistralForCausalLM"])
    assert load_prompter(str(model)).engine_only is None

    (model / "tekken.json").write_text("{}")
    (model / "consolidated.safetensors").write_text("")

    assert load_prompter(str(model)).engine_only == "Mistral's tokenizer: KeyError"


def test_no_such_model(tmp_path: Path) -> None:
    """A missing model is a reason, not an error."""
    prompter = load_prompter(str(tmp_path / "nothing"), local_files_only=True)

    assert prompter.engine_only is not None


def test_broken_tokenizer(model: Path) -> None:
    """So is a broken one."""
    (model / "tokenizer.json").write_text("{")

    assert load_prompter(str(model)).engine_only is not None


def test_a_tokenizer_that_panics(model: Path) -> None:
    """So is one on which a library written in Rust panics; an interrupt is no failure of it."""
    panic = type("PanicException", (BaseException,), {})

    with mock.patch("transformers.AutoTokenizer.from_pretrained", side_effect=panic("index")):
        assert load_prompter(str(model)).engine_only == "PanicException: index"
    with (
        mock.patch("transformers.AutoTokenizer.from_pretrained", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        load_prompter(str(model))


def test_slow_or_odd_tokenizers() -> None:
    """Tokenizers written in Python, or with rules of their own, are left to the engine."""

    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return super().apply_chat_template(*args, **kwargs)

    own = Own(tokenizer_file=str(MODEL / "tokenizer.json"))
    splitting = PreTrainedTokenizerFast(
        tokenizer_file=str(MODEL / "tokenizer.json"), split_special_tokens=True
    )

    for tokenizer, reason in ((object(), "fast"), (own, "its own"), (splitting, "splits")):
        with pytest.raises(NeedsEngine, match=reason):
            model_files.check_tokenizer(tokenizer)


def test_no_chat_template(model: Path) -> None:
    """A model without one can be completed; messages are the engine's to refuse."""
    (model / "chat_template.jinja").unlink()

    prompter = load_prompter(str(model))

    assert prompter.engine_only is None
    with pytest.raises(NeedsEngine) as caught:
        prompter.plan_chat(HELLO)
    assert caught.value.reason == "template"


def test_broken_chat_template(model: Path) -> None:
    """One that does not compile is left to the engine."""
    (model / "chat_template.jinja").write_text("{% for %}")

    with pytest.raises(NeedsEngine):
        load_prompter(str(model)).plan_chat(HELLO)


def test_given_template(model: Path, tmp_path: Path) -> None:
    """`--chat-template` is a path, or a template itself."""
    path = tmp_path / "given.jinja"
    path.write_text("given {{ messages[0].content }}")

    assert _text(load_prompter(str(model), chat_template=path)) == "given hello"
    assert _text(load_prompter(str(model), chat_template=str(path))) == "given hello"
    assert _text(load_prompter(str(model), chat_template="x\n{{ messages | length }}")) == "x\n1"
    with pytest.raises(OSError, match="missing"):
        load_prompter(str(model), chat_template=tmp_path / "missing")


def test_named_templates(model: Path) -> None:
    """A model may have a template for tools, and templates that are asked for by name."""
    extra = model / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools {{ tools | length }}")
    (extra / "short.jinja").write_text("short")

    assert _text(load_prompter(str(model)), WITH_TOOLS) == "tools 1"
    assert _text(load_prompter(str(model))).startswith("<|im_start|>")
    assert _text(load_prompter(str(model), chat_template="short")) == "short"


@pytest.mark.parametrize(("processor", "is_local"), [("same", True), ("other", False)])
def test_processor_template(model: Path, processor: str, is_local: bool) -> None:
    """The engine asks a multimodal processor first: where that differs, it is asked itself."""
    own = (model / "chat_template.jinja").read_text()
    content = {"chat_template": own if processor == "same" else "other"}
    (model / "chat_template.json").write_text(json.dumps(content))
    prompter = load_prompter(str(model))

    if is_local:
        assert _text(prompter).startswith("<|im_start|>")
    else:
        with pytest.raises(NeedsEngine):
            prompter.plan_chat(HELLO)
    assert "# Tools" in _text(prompter, WITH_TOOLS)
