"""The JSON Schema of the configuration file, for editors and CI.

It has what the types say, and the shorter forms that the loader accepts (router.config.loader): a
URL for a replica. What types cannot say (router.config.checks) only the loader refuses.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from policies.registry import POLICIES
from router.config.loader import SWITCHES
from router.config.tree import SECTIONS, Config

_TEXT: Final = {"type": "string"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a whole file."""
    schema = msgspec.json.schema(Config, schema_hook=lambda _: dict(_TEXT))
    parts = schema["$defs"]
    config = parts["Config"]
    config |= {"title": "warmroute configuration", "description": "A file for `warmroute serve`."}
    for name, heading in SECTIONS.items():
        config["properties"][name]["title"] = heading
        config["properties"][name].pop("default")  # of a section: its keys have their own

    def field(section: str, key: str) -> dict[str, Any]:
        part = config["properties"][section]["$ref"].rpartition("/")[2]
        found: dict[str, Any] = parts[part]["properties"][key]
        return found

    for section, key in SWITCHES:
        _also(field(section, key), {"type": "boolean"})
    replicas = config["properties"]["replicas"]
    replicas["items"] = {"anyOf": [dict(_TEXT), replicas["items"]]}
    for master in (field("mooncake", "master"), parts["PoolConfig"]["properties"]["master"]):
        _also(master, {"type": "array", "items": dict(_TEXT)})
    _also(field("policy", "name"), {"enum": sorted(POLICIES)})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _also(field: dict[str, Any], form: dict[str, Any]) -> None:
    """Allow another form of a value."""
    kept = ("description", "default", "title")
    main = {key: field.pop(key) for key in list(field) if key not in kept}
    field["anyOf"] = [form, *main.get("anyOf", [main])]
