"""Runs at the start of every Python process of the tests (tests/conftest.py puts it on the path).

transformers 5 reads all of its own 3,000 files at import, twice, to learn what could be imported,
and the metadata of every installed package: 1.6 s of 2.5 s of CPU, in a hundred processes that the
tests start. Here the answers are kept in build/startup until the installed packages change. What is
imported, and what it does, is the same.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = "transformers.utils.import_utils"
_KEPT = Path(__file__).resolve().parents[2] / "build" / "startup"


class _Finder:
    """Lets one module be found as ever, and patches it when it has been executed.

    A `MetaPathFinder` but by name: `importlib.abc` is not imported for it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            installed = os.stat(Path(spec.origin).parents[2]).st_mtime_ns
            _patch(spec.loader, f"{sys.hexversion}-{installed}")
        return spec


def _patch(loader: Any, state: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        import importlib.metadata  # 40 ms, of which every other process would have its share

        distributions = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = _kept(distributions, state)
        try:
            execute(module)
        finally:
            importlib.metadata.packages_distributions = distributions
        structure = _kept(module.define_import_structure, state)
        module.define_import_structure = structure  # type: ignore[attr-defined]

    loader.exec_module = exec_module


def _kept(ask: Callable[..., Any], state: str) -> Callable[..., Any]:
    """Answer from a file if there is one for these arguments, else ask and write it."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        given = "-".join(str(each).replace(os.sep, "_") for each in (*args, *kwargs.values()))
        file = _KEPT / f"{ask.__name__}-{given[-100:]}-{state}"
        with suppress(OSError, ValueError, EOFError, TypeError):
            return marshal.loads(file.read_bytes())
        found = ask(*args, **kwargs)
        with suppress(OSError, ValueError):
            _KEPT.mkdir(parents=True, exist_ok=True)
            mine = file.with_name(f"{file.name}.{os.getpid()}")
            mine.write_bytes(marshal.dumps(found))
            mine.replace(file)
        return found

    return answer


if "transformers" not in sys.modules:
    sys.meta_path.insert(0, _Finder())
