"""The registry of prompters."""

from __future__ import annotations

from router.prompt import Prompter, Prompters


def test_loaded_once() -> None:
    """Whoever begins first loads; while that lasts, nobody has it."""
    prompters = Prompters()

    assert prompters.begin("m")
    assert not prompters.begin("m")
    assert prompters.loading() == ["m"]
    assert prompters.get("m") is None
    assert prompters.needs_engine("m") == "no tokenizer loaded"
    prompters.finish("m", Prompter(None, None, reason="why"))

    assert prompters.loading() == []
    assert not prompters.begin("m")
    assert prompters.get("m") is not None
    assert prompters.needs_engine("m") == "why"


def test_audit() -> None:
    """A disagreement with the engine puts the model into the engine's hands."""
    prompters = Prompters()
    assert prompters.audit("unknown", 1, 2)
    prompters.finish("m", Prompter(None, None))

    assert prompters.audit("m", 5, 5)
    assert not prompters.audit("m", 5, 6)

    assert prompters.needs_engine("m") == "counted 5 prompt tokens, the engine 6"
