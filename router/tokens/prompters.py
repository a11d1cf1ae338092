"""The prompters of all models behind this router."""

from __future__ import annotations

from collections.abc import Mapping

from router.base.releases import V0_32, Release
from router.tokens.prompter import Prompter


class Prompters:
    """One prompter per served model, loaded for the first replica that serves it.

    A replica of a newer release, with other rules for prompts, loads it again. The old prompter
    serves until then.

    An adapter has its base model's prompter. While a prompter is loading, prompts do not wait: they
    are routed without tokens.
    """

    __slots__ = ("_bases", "_by_model", "_loading", "_releases")

    def __init__(self) -> None:
        self._by_model: dict[str, Prompter] = {}
        self._loading: set[str] = set()
        self._bases: dict[str, str] = {}
        self._releases: dict[str, Release] = {}  # whose rules apply now, or once loading is done

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
        """Drop the evidence of a replica that is gone, or is another process now."""
        for prompter in self._by_model.values():
            prompter.trust.forget(replica)

    def base(self, model: str) -> str:
        """Return an adapter's base model; of any other model its own name."""
        return self._bases.get(model, model)

    def get(self, model: str) -> Prompter | None:
        """Return the prompter of a model or adapter; None: not loaded (yet)."""
        return self._by_model.get(self._bases.get(model, model))
