"""Certificates for tests, made in milliseconds by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

_EXTENSIONS: Final = "subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n"


class Authority:
    """A CA of its own, with its files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.cert = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", self._key, "-out", self.cert),
        )

    def issue(self, name: str, *, names: str = "IP:127.0.0.1", days: int = 2) -> tuple[Path, Path]:
        """Issue a certificate; return its file and its key's. Days below 0: it has expired."""
        cert, key, request = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(_EXTENSIONS.format(names=names))
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key),
            *("-CAcreateserial", "-days", str(days), "-extfile", extensions, "-out", cert),
        )
        return cert, key


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
