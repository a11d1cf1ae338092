"""What a worker of `serve --workers` gets from its parent, and how that changes its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.config.tree import Config

SOCKET_SUFFIX: Final = ".sock"


class Worker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several processes that answer at one port.

    number: From 1 to `total`; a worker that is started again keeps it.
    start: Counts the starts of all workers: the lowest one has run for longest.
    is_again: Whether another process had this number before.
    folder: Where the sockets of all workers are; only this user can read it.
    port, admin_port: What the parent has reserved.
    redis_url: Of the parent's own Redis; None: one is configured.
    """

    number: int
    total: int
    start: int
    is_again: bool
    folder: Path
    port: int
    admin_port: int
    redis_url: str | None

    @property
    def socket(self) -> Path:
        """Return where its admin API listens for the other workers, once it accepts requests."""
        return self.folder / f"{self.start:09d}-{self.number}{SOCKET_SUFFIX}"

    def applied(self, config: Config) -> Config:
        """Return the settings of this worker."""
        redis = config.redis
        if self.redis_url is not None:
            redis = replace(
                redis, url=self.redis_url, username=None, password_file=None, ca_file=None
            )
        return replace(
            config,
            listen=replace(config.listen, port=self.port),
            admin=replace(config.admin, port=self.admin_port),
            redis=redis,
        )

    def packed(self) -> str:
        """Write it as an argument."""
        return msgspec.json.encode(self, enc_hook=str).decode()


def unpacked(text: str) -> Worker:
    """Read an argument that `packed` wrote.

    Raises:
        ValueError: it is none.
    """
    return msgspec.json.decode(text, type=Worker, dec_hook=lambda _, path: Path(path))


def of_socket(file: Path) -> tuple[int, int] | None:
    """Return the start and the number of the worker that a socket belongs to; None: of none."""
    start, dash, number = file.name.removesuffix(SOCKET_SUFFIX).partition("-")
    is_one = file.name.endswith(SOCKET_SUFFIX) and dash and start.isdecimal() and number.isdecimal()
    return (int(start), int(number)) if is_one else None
