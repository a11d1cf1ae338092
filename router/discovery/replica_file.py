"""Replicas from a file: a list in the shape of `replicas:` in the configuration, YAML or JSON.

    - http://10.0.0.5:8000
    - {url: "http://10.0.0.6:8000", name: west}

A mapping with the one key `replicas` also works. The file is checked every second: its time, size
and inode, through symbolic links. So an atomic rename and the links of a Kubernetes ConfigMap are
seen. A change counts once two checks have seen the same. A file that cannot be read is refused as a
whole, with the line or field.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.base.errors import ConfigError, DiscoveryError
from router.base.watched_file import WatchedFile
from router.config import ReplicaConfig, check_replica_list, explained, yaml_file
from router.discovery.sources import Sink
from router.replicas.entry import Found

_LOOK_S: Final = 1.0


class ReplicaFile:
    """A file that is followed.

    Args:
        files: Where it is read: it may be large, or remote.
        look_s: The pause between checks.
    """

    def __init__(self, path: Path, files: Executor, *, look_s: float = _LOOK_S) -> None:
        self.name = f"file {path}"
        self._path = path
        self._files = files
        self._look_s = look_s

    async def look(self) -> Sequence[Found]:
        return await asyncio.get_running_loop().run_in_executor(self._files, self._read)

    async def run(self, sink: Sink) -> None:
        loop = asyncio.get_running_loop()
        watched = await loop.run_in_executor(self._files, WatchedFile, self._path)
        is_new = True
        while True:
            if is_new:
                try:
                    sink.found(self.name, await self.look())
                except DiscoveryError as exc:
                    sink.failed(self.name, exc.message)
            await asyncio.sleep(self._look_s)
            is_new = await loop.run_in_executor(self._files, watched.has_changed)

    def _read(self) -> tuple[Found, ...]:
        data = b""
        try:
            data = yaml_file.read(self._path)
            return tuple(Found(replica=replica) for replica in parse(data))
        except ConfigError as exc:
            raise DiscoveryError(yaml_file.placed(exc, self._path, data).message) from exc


class _Content(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: tuple[ReplicaConfig, ...]


def parse(data: bytes) -> tuple[ReplicaConfig, ...]:
    """Read the content of such a file.

    Raises:
        ConfigError: it is invalid; the message names the line or the field.
    """
    tree = yaml_file.parse(data)
    if isinstance(tree, list):
        tree = {"replicas": tree}
    if not isinstance(tree, dict):
        raise ConfigError("write a list of replicas, or a mapping with the key replicas")
    try:
        replicas = msgspec.convert(_with_urls(tree), _Content, strict=False).replicas
    except msgspec.ValidationError as exc:
        raise explained(str(exc), _Content) from exc
    except RecursionError as exc:
        raise ConfigError("nested too deep") from exc
    check_replica_list(replicas)
    return replicas


def _with_urls(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Write bare base URLs as replicas."""
    replicas = tree.get("replicas")
    if not isinstance(replicas, list):
        return tree
    return {**tree, "replicas": [{"url": e} if isinstance(e, str) else e for e in replicas]}
