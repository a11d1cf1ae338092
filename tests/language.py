"""Check that texts keep to plain words and short sentences: part of `make lint`.

    python -m tests.language            every page, and every text in the code
    python -m tests.language FILES      these files

Pages are checked whole. In Python files every text is checked: docstrings, comments, help,
descriptions of options and metrics, log messages, errors and findings. In the alerts, the texts for
operators are checked. Each problem is a line, `file:line: message`.

A sentence ends with its paragraph, list item, table cell or line that ends in a colon. An inline
code span is one word; a command block is none.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = (ROOT / "router/tokens/models/deepseek_v4.py", ROOT / "loadtest/agent_text.py")  # prompts
MOST_WORDS = 30
SOURCES = (
    "*.md", "docs/**/*.md", "router/**/*.py", "policies/**/*.py", "loadtest/**/*.py",
    "docker/grafana/*.py", "docker/prometheus/alerts.yml",
)  # fmt: skip
INSTEAD: Final = {
    r"dear(er|est)?": "expensive, or slow",
    r"cheap(er|est)? prefill": "fast prefill",
    r"anew": "again",
    r"likewise": "also, or similarly",
    r"alike": "similar, equally, or both",
    r"of late": "recently",
    r"forth": "again, or back",
    r"(find|finds|found|finding) out": "discover, or detect",
    r"(dis)?believ(e|es|ed|ing)": "trust, or expect",
    r"doubt(s|ing|ed(?!,))?": "suspect",
    r"over-?run(s|ning)?": "over-commit, or exceed",
    r"signs? of life": "keep-alive comment, or activity",
    r"(let|lets|letting) go": "release, or evict",
    r"(fall|falls|fell|fallen|falling) out": "evict",
    r"times? between tokens|(?-i:TBT)": "inter-token latency (ITL)",
    r"(?<!experiment )(?<!experiment, )(?-i:[Aa]rms?)": "variant (of an experiment)",
    r"after \S+ of the time": "NN % faster",
}
"""What is not written, as a pattern of whole words, and what is instead. Source: the glossary."""

_REFUSED = [
    (re.compile(rf"(?<![\w./{{\"-])(?:{pattern})(?![\w/=-])", re.IGNORECASE), instead)
    for pattern, instead in INSTEAD.items()
]
_SQL = ("SELECT ", "STRUCT(")
_TRIPLE = (b'"""', b'f"""', b'r"""')
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)[\"')”]*\s+|(?<=:)\s*\n")
_TABLE = re.compile(r"(?:^.*\S {2,}\S.*\n?)(?:^.+\n?)*", re.MULTILINE)  # columns, to a blank line
_WORD = re.compile(r"\S*\w\S*")
_UNWRAPPED = re.compile(r"\x08\n(.+\n?)*")  # click shows such a paragraph line by line: commands
_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")


def problems(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the line and the message of each problem of a Markdown text."""
    text = _UNWRAPPED.sub(lambda found: "\n" * found[0].count("\n"), text)
    line = 0
    for token in _MARKDOWN.parse(text):
        line = token.map[0] if token.map else line
        if token.type == "inline":
            for at, sentence in _sentences(token):
                yield from ((first_line + line + at, message) for message in _judge(sentence))


def _sentences(token: Token) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a paragraph or cell, with the line in it that each begins at."""
    plain = "".join(map(_plain, token.children or []))
    start = 0
    for end in [*_SENTENCE_END.finditer(plain), None]:
        yield plain.count("\n", 0, start), plain[start : end.start() if end else None]
        start = end.end() if end else start


def _plain(token: Token) -> str:
    """Return what a reader sees of a piece; code is one word that nothing refuses."""
    match token.type:
        case "code_inline":
            return "`code`"
        case "softbreak" | "hardbreak":
            return "\n"
        case "html_inline" | "link_open" | "link_close" | "image":
            return ""
        case _:
            return token.content


def _judge(sentence: str) -> Iterator[str]:
    sentence = " ".join(sentence.split())
    for pattern, instead in _REFUSED:
        for found in pattern.finditer(sentence):
            yield f'"{found[0]}": write {instead}'
    num_words = len(_WORD.findall(sentence))
    if num_words > MOST_WORDS:
        yield f'{num_words} words, at most {MOST_WORDS}: "{" ".join(sentence.split()[:6])} …"'


# -------------------------------------------------------------------- texts in files


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file that people read, and the line each begins at."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _of_python(ast.parse(content), content.splitlines())
        yield from _docstrings(ast.parse(content))
        yield from _comments(content)
    elif path.suffix == ".yml":
        yield from _of_alerts(yaml.compose(content))
    else:
        yield 1, content


def _of_python(tree: ast.Module, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield strings that are sentences; other strings in triple quotes are queries and data."""
    pieces: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "split":
            pieces.add(node.value)  # a list of names
            continue
        if isinstance(node, ast.JoinedStr):
            pieces.update(node.values)
            text = "".join(map(_piece, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            text = node.value
        else:
            continue
        in_triple_quotes = lines[node.lineno - 1].encode()[node.col_offset :].startswith(_TRIPLE)
        if " " in text.strip() and not (in_triple_quotes or text.lstrip().startswith(_SQL)):
            yield node.lineno, text.strip()


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield docstrings, those of constants included, as Markdown: their blocks stay as they are."""
    for node in ast.walk(tree):
        for each in ast.iter_child_nodes(node):
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, _TABLE.sub(_as_list, inspect.cleandoc(each.value.value))


def _as_list(found: re.Match[str]) -> str:
    """Make a list of a table's lines: each is a text of its own."""
    return re.sub(r"^ *(?=\S)", "- ", found[0], flags=re.MULTILINE)


def _comments(content: str) -> Iterator[tuple[int, str]]:
    """Yield comments; lines of their own that follow one another are one text."""
    first, text, last = 0, "", -1
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, is_own = token.start[0], not token.line[: token.start[1]].strip()
        if is_own and line == last + 1:
            text += "\n"
        else:
            if text:
                yield first, text
            first, text = line, ""
        text += token.string.lstrip("#: ")
        last = line if is_own else -1
    if text:
        yield first, text


def _piece(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "`value`"


def _of_alerts(node: yaml.Node | None) -> Iterator[tuple[int, str]]:
    """Yield summaries and descriptions."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _of_alerts(each)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value in ("summary", "description"):
                yield value.start_mark.line + 1, value.value
            else:
                yield from _of_alerts(value)


def main(argv: Sequence[str]) -> int:
    """Print the problems of files; return 1 if there are any."""
    files = [Path(name) for name in argv] or [
        path for pattern in SOURCES for path in sorted(ROOT.glob(pattern)) if path not in FOREIGN
    ]
    found = [
        f"{path.resolve().relative_to(ROOT)}:{at}: {message}"
        for path in files
        for line, text in texts(path)
        for at, message in problems(text, line)
    ]
    print("\n".join([*found, f"{len(found)} problems of language"]) if found else "language: ok")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
