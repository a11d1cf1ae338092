"""The prompters of all models behind this router, and which of them can be relied on."""

from __future__ import annotations

from collections.abc import Mapping

from router.releases import V0_32, Release
from router.tokens.prompter import Prompter


class Prompters:
    """One prompter per served model; loaded once, whichever replica names the model first.

    It is loaded again for a replica of a newer release if that makes prompts by other rules. The
    old one serves until then.

    Adapters share their base model's. Who asks before the loading is done gets None: such a
    prompt is routed without tokens, it does not wait.
    """

    __slots__ = ("_bases", "_by_model", "_loading", "_releases")

    def __init__(self) -> None:
        self._by_model: dict[str, Prompter] = {}
        self._loading: set[str] = set()
        self._bases: dict[str, str] = {}
        self._releases: dict[str, Release] = {}  # by whose rules prompts are made, or soon will be

    def adapt(self, adapters: Mapping[str, str]) -> None:
        """Serve adapters (name to base model) with their base models' prompters."""
        self._bases.update(adapters)

    def start_loading(self, model: str, release: Release = V0_32) -> bool:
        """Claim the loading of a model's prompter; False: it is loaded or being loaded."""
        if model in self._loading or self._releases.get(model, (0, 0)) >= release:
            return False
        self._loading.add(model)
        self._releases[model] = release
        return True

    def finish_loading(self, model: str, prompter: Prompter) -> None:
        """Use `prompter` for `model` from now on."""
        self._loading.discard(model)
        self._by_model[model] = prompter

    def loading(self) -> list[str]:
        """List the models whose prompters are being loaded."""
        return sorted(self._loading)

    def forget(self, replica: str) -> None:
        """Forget what a replica counted: it is gone, or another process."""
        for prompter in self._by_model.values():
            prompter.trust.forget(replica)

    def base(self, model: str) -> str:
        """Return an adapter's base model; of any other model its own name."""
        return self._bases.get(model, model)

    def get(self, model: str) -> Prompter | None:
        """Return the prompter of a model or adapter; None: not loaded (yet)."""
        return self._by_model.get(self.base(model))
