"""Tenants for tests of a whole router: their keys, salts and file."""

from __future__ import annotations

from pathlib import Path

from router.tenants.tenants import digest_of, written
from tests.faults.stage import SECRET

A, B, C = ({"Authorization": f"Bearer sk-{SECRET}-{name}"} for name in "abc")


SALT = f"{SECRET}-salt-of-tenant-b"


def tenants_file(folder: Path, *more: str, a: str = "", b: str = "") -> Path:
    """Write a file of tenants a (its salt is derived) and b (configured), and `more`."""
    path = folder / "tenants.yaml"
    digests = {n: written(digest_of(f"sk-{SECRET}-{n}")) for n in "abc"}
    path.write_text(
        f"secret: {SECRET}-{'0123456789' * 4}\ntenants:\n"
        f"  - {{name: a, keys: ['{digests['a']}'], {a}}}\n"
        f"  - {{name: b, keys: ['{digests['b']}'], salt: {SALT}, {b}}}\n"
        f"  - {{name: c, keys: ['{digests['c']}'], cache: shared}}\n"
        + "".join(f"  - {line}\n" for line in more)
    )
    return path
