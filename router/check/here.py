"""Looks at this machine: ports, files, and a router that may run here already."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from router.check.deadline import Deadline
from router.check.ports import why_not_free
from router.check.running import ask_router, total
from router.check.seen import FileSeen, PortSeen, RouterSeen
from router.config import Config

_ASK_S: Final = 2.0


async def look_here(config: Config, deadline: Deadline) -> RouterSeen:
    """Try the ports and the files that the configuration names."""
    files = tuple(_files(config))
    listen, page = await _port("listen", config.listen.host, config.listen.port, deadline)
    admin, _ = await _port("admin", config.admin.host, config.admin.port, deadline)
    if page is None:
        return RouterSeen(ports=(listen, admin), files=files)
    return RouterSeen(
        ports=(listen, admin),
        files=files,
        num_answered=total(page, "warmroute_requests_total"),
        num_audited=total(page, "warmroute_audited_total"),
    )


async def _port(key: str, host: str, port: int, deadline: Deadline) -> tuple[PortSeen, str | None]:
    """Look at a port, and get the page of the router that has it, if one has."""
    error = why_not_free(host, port) if port else None
    page = None
    if error is not None:
        with deadline.waiting("ports"):
            page = await ask_router(key, host, port, timeout_s=deadline.at_most(_ASK_S))
    return PortSeen(key=key, host=host, port=port, error=error, is_router=page is not None), page


# -- files ---------------------------------------------------------------------------------------


def _files(config: Config) -> Iterator[FileSeen]:
    for key, path in (
        ("engine.api_key_file", config.engine.api_key_file),
        ("admin.token_file", config.admin.token_file),
        ("redis.password_file", config.redis.password_file),
    ):
        if path is not None:
            yield FileSeen(key, str(path), _why_no_secret(path))
    for key, path in (
        ("forward.ca_file", config.forward.ca_file),
        ("redis.ca_file", config.redis.ca_file),
    ):
        if path is not None:
            yield FileSeen(key, str(path), why_no_bundle(path))
    for model, path in config.tokens.chat_templates.items():
        error = None if path.is_file() else "not a file"
        yield FileSeen(f"tokens.chat_templates.{model}", str(path), error)
    if config.log.decisions is not None:
        yield FileSeen(
            "log.decisions", str(config.log.decisions), _why_no_log(config.log.decisions)
        )


def _why_no_secret(path: Path) -> str | None:
    try:
        return None if path.read_text(encoding="utf-8").strip() else "it is empty"
    except OSError as exc:
        return exc.strerror or type(exc).__name__
    except UnicodeDecodeError:
        return "not UTF-8"


def why_no_bundle(path: Path) -> str | None:
    """Say why a file will not do as a CA bundle; None: it will."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        return "no certificates in it"
    except OSError as exc:
        return exc.strerror or type(exc).__name__
    return None


def _why_no_log(path: Path) -> str | None:
    """Say why nothing can be appended to a file, without making it."""
    if path.is_dir():
        return "a directory"
    if path.exists():
        return None if os.access(path, os.W_OK) else "not writable"
    folder = path.parent
    if not folder.is_dir():
        return "its directory does not exist"
    return None if os.access(folder, os.W_OK) else "its directory is not writable"
