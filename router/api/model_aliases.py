"""Other names of models: clients that insist on names of their own get a served model.

Claude Code, say, asks for several models by names that change with its releases.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

import msgspec
from msgspec import UNSET, Struct, UnsetType

from router.api.body_fields import with_fields


class _Named(Struct):
    model: str | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(_Named)


class ModelAliases:
    """Writes the served model into bodies that ask for another name of it.

    Args:
        models: Name, in which `*` stands for any characters, to served model. The first that fits
            counts.

    names: Those without `*`.
    """

    __slots__ = ("_models", "names")

    def __init__(self, models: Mapping[str, str]) -> None:
        self.names = [name for name in models if "*" not in name]
        self._models = [(_pattern(name), model) for name, model in models.items()]

    def apply(self, body: bytes | None, served: Container[str]) -> bytes | None:
        """Return the body to read and to forward; without an alias it is `body` itself.

        Args:
            body: As a client sent it, decompressed. Only a JSON object has an alias.
            served: Models that are served under their own name: no alias hides them.
        """
        if not body:
            return body
        try:
            name = _DECODER.decode(body).model
        except (msgspec.DecodeError, RecursionError):
            return body  # its reader says what is wrong
        if name is UNSET or name in served:
            return body
        model = self.model_of(name)
        return body if model is None else with_fields(body, {"model": model})

    def model_of(self, name: str) -> str | None:
        """Return the served model that a name stands for; None: it is no alias."""
        return next((model for names, model in self._models if names.fullmatch(name)), None)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, name.split("*"))), re.DOTALL)
