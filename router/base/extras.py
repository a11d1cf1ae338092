"""Optional libraries: name the command that installs an extra of pyproject.toml."""

from __future__ import annotations

from importlib import metadata


def install_hint(extra: str) -> str:
    """Return how to install the libraries of an extra.

    The command names the libraries, not warmroute: it works for a checkout, for a wheel and for
    an image, and needs no package index that has warmroute.

    Raises:
        ValueError: there is no extra of that name with libraries of its own.
    """
    marker = f'extra == "{extra}"'
    libraries = [
        requirement.partition(";")[0].strip()
        for requirement in metadata.requires("warmroute") or ()
        if requirement.partition(";")[2].strip() == marker
    ]
    if not libraries:
        raise ValueError(f"no extra {extra!r}")
    return f"Install the extra `{extra}`: pip install " + " ".join(f"'{lib}'" for lib in libraries)
