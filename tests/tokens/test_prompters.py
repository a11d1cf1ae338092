"""The registry of prompters."""

from __future__ import annotations

from router.base.engines import V0_32, V0_33
from router.tokens import Prompter, Prompters


def test_loaded_once() -> None:
    """The first caller loads; while that lasts, there is none."""
    prompters = Prompters()

    assert prompters.start_loading("m")
    assert not prompters.start_loading("m")
    assert prompters.loading() == ["m"]
    assert prompters.get("m") is None
    prompters.finish_loading("m", Prompter.missing("why"))

    assert prompters.loading() == []
    assert not prompters.start_loading("m")
    loaded = prompters.get("m")
    assert loaded is not None
    assert loaded.engine_only == "why"


def test_adapters_share_their_bases() -> None:
    """An adapter is rendered and tokenized as its base model is."""
    prompters = Prompters()
    prompters.finish_loading("base", Prompter.missing(""))

    prompters.adapt({"adapter": "base"})

    assert prompters.get("adapter") is prompters.get("base") is not None


def test_a_replica_that_is_gone_is_forgotten_by_all() -> None:
    """Whatever models it served."""
    prompters, prompter = Prompters(), Prompter.missing("")
    prompters.finish_loading("m", prompter)
    prompter.trust.observe_usage("r1", 10, 11, has_others=True, now_s=0.0)
    assert prompter.trust.disagrees("r1")

    prompters.forget("r1")

    assert not prompter.trust.disagrees("r1")


def test_a_newer_replica_has_the_model_loaded_again() -> None:
    """Once; the old prompter serves until then, and an older replica changes nothing."""
    prompters, old, new = Prompters(), Prompter.missing(""), Prompter.missing("")
    assert prompters.start_loading("m", V0_32)
    assert not prompters.start_loading("m", V0_33)
    prompters.finish_loading("m", old)

    assert prompters.start_loading("m", V0_33)
    assert prompters.get("m") is old
    prompters.finish_loading("m", new)

    assert prompters.get("m") is new
    assert not prompters.start_loading("m", V0_32)
    assert not prompters.start_loading("m", V0_33)
