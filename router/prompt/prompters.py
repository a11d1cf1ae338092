"""The prompters of all models behind this router, and which of them can be relied on."""

from __future__ import annotations

from router.prompt.prompter import Prompter


class Prompters:
    """One prompter per served model; loaded once, whichever replica names the model first."""

    __slots__ = ("_by_model", "_loading")

    def __init__(self) -> None:
        self._by_model: dict[str, Prompter] = {}
        self._loading: set[str] = set()

    def begin(self, model: str) -> bool:
        """Claim the loading of a model's prompter; False: it is loaded or being loaded."""
        if model in self._by_model or model in self._loading:
            return False
        self._loading.add(model)
        return True

    def finish(self, model: str, prompter: Prompter) -> None:
        """Use `prompter` for `model` from now on."""
        self._loading.discard(model)
        self._by_model[model] = prompter

    def loading(self) -> list[str]:
        """List the models whose prompters are being loaded."""
        return sorted(self._loading)

    def get(self, model: str) -> Prompter | None:
        """Return a model's prompter; None: not loaded (yet)."""
        return self._by_model.get(model)

    def needs_engine(self, model: str) -> str | None:
        """Say why the engine must tokenize for a model; None: it is done here."""
        prompter = self._by_model.get(model)
        return "no tokenizer loaded" if prompter is None else prompter.engine_only

    def audit(self, model: str, num_tokens: int, prompt_tokens: int) -> bool:
        """Compare our count of a prompt made here with `usage.prompt_tokens`: do they agree?

        After a disagreement the engine tokenizes for the model.
        """
        prompter = self._by_model.get(model)
        return prompter is None or prompter.trust.observe_usage(num_tokens, prompt_tokens)
