"""Orders about LoRA adapters: loaded and unloaded at all replicas of their base model.

vLLM 0.32 has the routes for it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True alone (entrypoints/serve/
lora), and not with several API servers. Digests of blocks include an adapter's name and path, so
weights that changed belong under a new path: from the same one, engines go on with old blocks.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from router.base.errors import BadRequest, UnknownModel
from router.http.control import Control, EngineOrder
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import Replica

_Text = Annotated[str, Meta(min_length=1, max_length=4_096)]


class Adapter(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator wants loaded; `path` as engines see it. `base` None: the only base model.

    `load_inplace`: in place of one of that name.
    """

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    path: _Text
    base: _Text | None = None
    load_inplace: bool = False


class Adapters:
    """Lists, loads and unloads adapters."""

    def __init__(self, control: Control, registry: Registry, fleet: Fleet) -> None:
        self._control = control
        self._registry = registry
        self._fleet = fleet

    def describe(self) -> list[dict[str, Any]]:
        """List adapters, each with the replicas that have it and where they loaded it from."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        for replica in self._fleet.members.replicas:
            for model in replica.models:
                if model.parent is not None:
                    key = (model.id, replica.base_model)
                    found.setdefault(key, {})[replica.name] = model.root or ""
        return [
            {"name": name, "base": base, "paths": paths} for (name, base), paths in found.items()
        ]

    async def load(self, wanted: Adapter) -> dict[str, Any]:
        """Load an adapter at all replicas of its base; those that have it from there are left out.

        Raises:
            BadRequest, UnknownModel: nothing was sent: which base is not clear; none has it.
        """
        base = self._base(wanted.base)
        replicas = [replica for replica in self._fleet.members.replicas if _is_of(replica, base)]
        if not wanted.load_inplace:
            replicas = [r for r in replicas if r.adapter_path(wanted.name) != wanted.path]
        params = {"lora_name": wanted.name, "lora_path": wanted.path}
        inplace = {"load_inplace": True} if wanted.load_inplace else {}
        return await self._order("load_lora_adapter", params | inplace, wanted.name, base, replicas)

    async def unload(self, name: str, base: str | None) -> dict[str, Any]:
        """Unload an adapter at all replicas of its base that have it.

        Raises:
            BadRequest, UnknownModel: nothing was sent.
        """
        bases = {each["base"] for each in self.describe() if each["name"] == name}
        if not bases:
            raise UnknownModel(f"no replica has an adapter {name[:200]!r}")
        if base is None and len(bases) == 1:
            (base,) = bases
        base = self._base(base)
        replicas = [
            replica
            for replica in self._fleet.members.replicas
            if _is_of(replica, base) and replica.adapter_path(name) is not None
        ]
        if not replicas:
            raise UnknownModel(f"no replica of {base!r} has an adapter {name[:200]!r}")
        return await self._order("unload_lora_adapter", {"lora_name": name}, name, base, replicas)

    def _base(self, named: str | None) -> str:
        bases = dict.fromkeys(
            each.base_model for each in self._fleet.members.replicas if each.models
        )
        if named is None and len(bases) == 1:
            return next(iter(bases))
        if named is not None and any(_is_of(each, named) for each in self._fleet.members.replicas):
            return named
        known = ", ".join(bases) or "none known yet"
        if named is None:
            raise BadRequest(f"name the `base` model: {known}", param="base")
        raise UnknownModel(f"no replica serves {named[:200]!r}; base models: {known}", param="base")

    async def _order(
        self,
        route: str,
        params: dict[str, Any],
        name: str,
        base: str,
        replicas: list[Replica],
    ) -> dict[str, Any]:
        """Send the order; `complete`: all replicas of the base are now as it says."""
        names = [replica.name for replica in replicas]
        answers: list[dict[str, Any]] = []
        if names:
            order = EngineOrder(route=route, params=params, replicas=names)
            answers = (await self._control.follow(order))["replicas"]
        known = {replica.name for replica in self._fleet.members.replicas}
        missing = [entry.name for entry in self._registry.entries if entry.name not in known]
        return {
            "name": name,
            "base": base,
            "complete": not missing and not any(each["error"] for each in answers),
            "replicas": answers,
            "not_found_yet": missing,  # by this router: it was not asked what it serves
        }


def _is_of(replica: Replica, base: str) -> bool:
    return any(model.id == base and model.parent is None for model in replica.models)
