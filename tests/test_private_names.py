"""Tests look at what classes offer: no private name is read or patched."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
_PUBLIC = {"_asdict", "_exit", "_fields", "_replace"}  # of named tuples, and of `os`

# Names that are left. The list only gets shorter: a new name is refused, and so is an old entry.
LEFT: dict[str, set[str]] = {
    "discovery/test_watches.py": {"_register"},
    "engines/compat.py": {"_BY_ARCHITECTURE"},
    "engines/compat_facts.py": {
        "_REASONING_PARSERS_TO_REGISTER",
        "_TOOL_PARSERS_TO_REGISTER",
        "_VLLM_RENDERERS",
        "_VLLM_TOKENIZERS",
        "_actions",
    },
    "engines/record_hit_lengths.py": {"_cache"},
    "faults/several.py": {"_base"},
    "faults/stage.py": {"_collector_to_names", "_names_to_collectors"},
    "faults/test_poison.py": {"_beat_s"},
    "faults/test_redis.py": {"_connection", "_pool", "_share"},
    "faults/test_token_ids.py": {"_PATIENCE_S", "_PAUSE_S"},
    "fixtures/pool/make_listings.py": {
        "_build_token_databases",
        "_capacity_only",
        "_compute_group_tp_replication_factors",
        "_group_tp_replication_factors",
        "_init_lookup_key_prefixes",
        "_kv_cache_groups",
        "_lookup_key_prefixes",
        "_record_kv_connector_operation",
        "_select_store_layout",
    },
    "fuzz/test_engine_answers.py": {"_session"},
    "fuzz/test_master.py": {"_session"},
    "http/test_server.py": {"_acked", "_stalled_since_s", "_wire"},
    "kv_events/test_stream.py": {"_blocks", "_num_until_verified"},
    "kv_events/test_subscriber.py": {"_dealer"},
    "loadtest/test_agents.py": {"_plans"},
    "loadtest/text/test_text.py": {"_block_ids"},
    "observers/experiments/test_guardrails.py": {"_answers"},
    "observers/sessions/test_session_ledger.py": {"_of_opening"},
    "observers/sessions/test_turn_share.py": {"_series"},
    "pool/test_master.py": {"_url"},
    "pool/test_questions.py": {"_under_way"},
    "test_docs.py": {"_actions"},
    "test_upstream_chunks.py": {"_response"},
    "tokens/test_families.py": {"_frames", "_num_chars"},
    "tokens/test_fast_encoder.py": {"_tokenizer"},
    "tokens/test_prompter.py": {"_roots", "_tree"},
    "tokens/test_sandbox.py": {"_compile_jinja_template"},
    "tokens/vllm_routes.py": {
        "_disabled_thinking_effort",
        "_get_disabled_thinking_effort",
        "_merge_inline_system",
        "_should_merge_inline_system",
    },
}


def private_names(source: str) -> Iterator[str]:
    """Yield the private names that are imported, patched, or read of anything but `self`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=imported):
                names = [each.name for each in imported]
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "object" | "patch")):
                texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
                names = [str(text).rpartition(".")[2] for text in texts]
            case _:
                continue
        for name in names:
            if name.startswith("_") and not name.endswith("__") and name not in _PUBLIC:
                yield name


def found() -> dict[str, set[str]]:
    """Return the private names in each file of tests that has any."""
    files = {file.relative_to(TESTS).as_posix(): file for file in TESTS.rglob("*.py")}
    every = {name: set(private_names(file.read_text())) for name, file in files.items()}
    return {name: names for name, names in every.items() if names}


def test_no_private_name_is_added() -> None:
    new = {file: names - LEFT.get(file, set()) for file, names in found().items()}

    assert {file: names for file, names in new.items() if names} == {}


def test_the_list_gets_shorter() -> None:
    """What is no longer read or patched is taken off the list."""
    now = found()
    gone = {file: names - now.get(file, set()) for file, names in LEFT.items()}

    assert {file: names for file, names in gone.items() if names} == {}


def test_reads_imports_and_patches_are_found() -> None:
    source = """
from router.x import _a
thing._b.c
self._own
monkeypatch.setattr(module, "_d", 1)
monkeypatch.setattr("router.x._e", 1)
given._replace(x=1)
"""
    assert sorted(private_names(source)) == ["_a", "_b", "_d", "_e"]
