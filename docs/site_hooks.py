"""What mkdocs does beside its own work: links out of docs/, pages of the repository, llms.txt.

Files beside docs/ (CONTRIBUTING.md, SECURITY.md, CHANGELOG.md) become pages of the site. A link
to a source file becomes its path as text: the site has no copy of the code.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
# Documents of the repository that are pages, too: file -> page
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contribute/contributing.md",
    "SECURITY.md": "operate/reporting.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Link the repository in the head of each page, once it is published."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    url = project["urls"]["Repository"]
    if not (urlsplit(url).hostname or "").endswith(".example"):
        config["repo_url"], config["repo_name"] = url, config["site_name"]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the repository's own documents."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_moved(text, source, page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at pages of the site, or at nothing."""
    uri = page.file.src_uri
    return markdown if uri in PAGES.values() else _moved(markdown, f"docs/{uri}", uri)


def on_post_build(config: Any) -> None:
    """Write llms.txt, the list of pages for language models (llmstxt.org), and their sources."""
    site = Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for source in sorted((ROOT / "docs").rglob("*.md")):
        uri = source.relative_to(ROOT / "docs").as_posix()
        text = source.read_text(encoding="utf-8")
        title, first, *_ = [line for line in text.splitlines() if line and line[0] != "<"]
        (site / uri).parent.mkdir(parents=True, exist_ok=True)
        (site / uri).write_text(text, encoding="utf-8")
        lines.append(f"- [{title.removeprefix('# ')}]({uri}): {first}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _moved(text: str, source: str, page: str) -> str:
    """Rewrite the links of `source`, a path of the repository, for its place in the site."""

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        file = ((ROOT / source).parent / target).resolve()
        named = file.relative_to(ROOT).as_posix()
        if named in PAGES:
            inside = PAGES[named]
        elif named.startswith("docs/") and file.is_file():
            inside = named.removeprefix("docs/")
        else:
            return words if words.startswith("`") else f"{words} (`{named}`)"
        up = "../" * page.count("/")
        return f"[{words}]({up}{inside}{anchor})"

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)
