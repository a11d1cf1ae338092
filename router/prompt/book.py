"""The prompters of all served models, by name, while they load and after."""

from __future__ import annotations

from collections.abc import Mapping

from router.prompt.prompter import Prompter


class Prompters:
    """Served model -> its `Prompter`; adapters share their base model's.

    A model asked for before its tokenizer is loaded has none yet: its prompts are routed without
    tokens, none of them waits.
    """

    __slots__ = ("_bases", "_loaded", "_loading")

    def __init__(self) -> None:
        self._loaded: dict[str, Prompter] = {}
        self._loading: set[str] = set()
        self._bases: dict[str, str] = {}

    def begin(self, model: str, adapters: Mapping[str, str]) -> bool:
        """Take the loading of `model` upon oneself; False: somebody did.

        `adapters` maps adapter name to base model.
        """
        self._bases.update(adapters)
        if model in self._loaded or model in self._loading:
            return False
        self._loading.add(model)
        return True

    def finish(self, model: str, prompter: Prompter) -> None:
        """Hand out `prompter` for `model` from now on."""
        self._loading.discard(model)
        self._loaded[model] = prompter

    def loading(self) -> list[str]:
        """List the models whose tokenizer is on its way."""
        return sorted(self._loading)

    def get(self, model: str) -> Prompter | None:
        """Find the prompter of a model or adapter; None: not loaded (yet)."""
        return self._loaded.get(self._bases.get(model, model))

    def items(self) -> list[tuple[str, Prompter]]:
        """List what is loaded."""
        return list(self._loaded.items())
