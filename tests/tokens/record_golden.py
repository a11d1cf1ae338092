"""Record vLLM's token ids for the corpora: `python -m tests.tokens.record_golden`, where vLLM is.

Runs the engine's own request models and renderers (the code behind its routes) without weights, and
writes golden/: per corpus and template a list, in the corpus's order. An entry is
"<tokens>:<BLAKE2b-64 of the ids>", or null if the engine refuses the request.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.tokens.corpus import Body, chat_bodies, completion_bodies
from tests.tokens.corpus_responses import responses_bodies
from tests.tokens.messages_corpus import messages_bodies
from tests.tokens.vllm_routes import HERE, MODEL, Rendering

GOLDEN: Final = HERE / "golden"
SEED: Final = 1
TEMPLATES: Final[Mapping[str, Path | None]] = {
    "model": None,
    **{path.stem: path for path in sorted((HERE / "templates").glob("*.jinja"))},
}
# With the template `dump` an engine with the Messages API does not start.
_MESSAGES: Final = {
    **{name: TEMPLATES[name] for name in ("model", "agent", "parts")},
    **{path.stem: path for path in sorted((HERE / "templates" / "messages").glob("*.jinja"))},
}


class Corpus(NamedTuple):
    """Requests of one API, and the templates to render them with.

    file: Where the entries of a template are, below golden/.
    has_bos: Whether the tokenizer begins every text with a special token.
    """

    api: str
    bodies: Callable[[int, int], Iterator[Body]]
    templates: Mapping[str, Path | None]
    file: str = "{}.json"
    count: int = 600
    has_bos: bool = False

    def path(self, template: str) -> Path:
        """Return the file with the entries of a template."""
        return GOLDEN / self.file.format(template)


CORPORA: Final[Mapping[str, Corpus]] = {
    "chat": Corpus("chat", chat_bodies, TEMPLATES),
    "completions": Corpus("completion", completion_bodies, {"completions": None}),
    "messages": Corpus("messages", messages_bodies, _MESSAGES, "messages/{}.json"),
    "responses": Corpus("responses", responses_bodies, TEMPLATES, "responses_{}.json", 500),
    "bos": Corpus("responses", responses_bodies, {"bos": None}, "responses_{}.json", 100, True),
}


def model_with_bos(directory: Path) -> Path:
    """Copy the model, with a tokenizer that puts `<|endoftext|>` before a text."""
    shutil.copytree(MODEL, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer))
    return directory


async def record(corpus: Corpus, model: Path) -> None:
    """Ask vLLM, template by template, and write the entries."""
    rendering = Rendering(model)
    for name, template in corpus.templates.items():
        routes = rendering.routes(template)
        bodies = corpus.bodies(SEED, corpus.count)
        entries = [await routes.entry(corpus.api, body) for body in bodies]
        text = json.dumps({"seed": SEED, "entries": entries}, indent=0)
        corpus.path(name).write_text(text + "\n")
        print(name, sum(entry is not None for entry in entries), "of", len(entries))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for name in sys.argv[1:] or CORPORA:
            has_bos = CORPORA[name].has_bos
            model = model_with_bos(Path(scratch) / "model") if has_bos else MODEL
            asyncio.run(record(CORPORA[name], model))
    os._exit(0)  # vLLM's threads would linger
