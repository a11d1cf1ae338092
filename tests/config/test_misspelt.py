"""Each key and each value of each file, misspelt: a ConfigError that names it, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
import yaml
from msgspec import Struct

from router import config
from router.base.errors import ConfigError
from router.config import Config
from router.tenants.tenants import TenantsFile, read

NEEDED: dict[str, dict[str, Any]] = {
    "ReplicaConfig": {"url": "http://127.0.0.1:1"},
    "PoolConfig": {"name": "p", "master": "http://127.0.0.1:1"},
    "TenantsFile": {"tenants": [{"name": "t", "cache": "shared"}]},
    "TenantEntry": {"name": "t", "cache": "shared"},
    "Experiment": {
        "name": "e",
        "variants": [{"name": "a", "policy": "kv_aware"}, {"name": "b", "policy": "random"}],
    },
    "VariantConfig": {"name": "a", "policy": "kv_aware"},
}
WRONG = ("§", "", -1, 1e400, [], ["§"], {}, {"§": "§"}, None, True)
Path_ = tuple[str | int, ...]


def struct_in(hint: Any) -> type[Struct] | None:
    """Find the section that a type has; of a list, that of its entries."""
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and issubclass(each, Struct):
            return each
        if each is not hint and get_origin(each) is not None:
            found = struct_in(each)
            if found is not None:
                return found
    return None


def keys(section: type[Struct], prefix: Path_ = ()) -> Iterator[tuple[Path_, type[Struct]]]:
    """List all keys of a file, with the section that each is in; 0: an entry of a list."""
    hints = get_type_hints(section)
    for field in msgspec.structs.fields(section):
        path, hint = (*prefix, field.encode_name), hints[field.name]
        yield path, section
        inner = struct_in(hint)
        if inner is not None:
            is_list = get_origin(hint) is tuple
            yield from keys(inner, (*path, 0) if is_list else path)


def tree_with(root: type[Struct], path: Path_, value: Any) -> Any:
    """Write a file that has a value at a path, and what its entries of lists need."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    hint = get_type_hints(root).get(str(step)) if isinstance(step, str) else None
    inner = (struct_in(hint) if hint is not None else None) or root
    if step == 0:
        return [tree_with(root, rest, value)]
    needed = NEEDED.get(root.__name__, {})
    return {**needed, str(step): tree_with(inner, rest, value)}


FILES = [(Config, lambda path: config.load(path)), (TenantsFile, read)]
KEYS = [(root, load, path) for root, load in FILES for path, _ in keys(root)]


def refusal(load: Any, file: Path) -> str | None:
    try:
        load(file)
    except ConfigError as error:
        return error.message
    return None


def words_of(message: str) -> set[str]:
    return set(re.findall(r"[a-z_]+", message))


def names(path: Path_) -> str:
    return ".".join(str(step) for step in path if step != 0)


@pytest.mark.parametrize(("root", "load", "path"), KEYS, ids=[names(path) for _, _, path in KEYS])
def test_what_is_misspelt_is_named(root: Any, load: Any, path: Path_, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    wrong = (*path[:-1], f"{str(path[-1])[:-1]}ß")
    file.write_text(yaml.safe_dump(tree_with(root, wrong, 1), allow_unicode=True))
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert str(wrong[-1]) in refused.value.message

    for value in WRONG:
        file.write_text(yaml.safe_dump(tree_with(root, path, value), allow_unicode=True))
        message = refusal(load, file)
        assert message is None or {str(path[-1]), str(path[0])} & words_of(message), value
