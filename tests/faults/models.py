"""Copies of the tiny model that differ in one file."""

from __future__ import annotations

import shutil
from pathlib import Path

from loadtest.tiny_model import MODEL_DIR


def model_dir(folder: Path, *, without: str = "", template: str | None = None) -> str:
    """Copy the tiny model, leaving something out or giving it another chat template."""
    shutil.copytree(MODEL_DIR, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    if without:
        (folder / without).unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)
