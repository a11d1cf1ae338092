"""Facts about the vLLM of this interpreter, as JSON: what warmroute's rules depend on.

Run by tests.engines.compat, for the installed release and for another one. One function a kind:
it returns names, or values by name. What cannot be asked is the reason, as text: it has moved.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, get_args

ROOT: Final = Path(__file__).resolve().parents[2]
DATA: Final = ROOT / "tests" / "data"
Facts = dict[str, Any]
TEXTS: Final = (
    "Generation is paused.",
    "The model is currently scaling.",
    "This data-parallel rank has been retired",
    "X-data-parallel-rank",
    "X-Session-ID",
    "VLLM_SYSTEM_START_DATE",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
    "kv_load_failure_policy",
)
"""What is read in errors and by probes."""


def hashes() -> Facts:
    """Whether recorded digests are this release's own: salts, adapters, items, next tokens."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    found: dict[str, list[int]] = {}
    for file in ("hash", "lookahead"):
        for vector in json.loads((DATA / f"{file}_vectors.json").read_text())["vectors"]:
            if not vector.get("tagged", True):
                continue  # of older releases
            os.environ.pop("PYTHONHASHSEED", None)
            if vector.get("seed", "vllm-none-hash") != "vllm-none-hash":
                os.environ["PYTHONHASHSEED"] = vector["seed"]
            hash_fn = get_hash_fn_by_name(vector["algorithm"])
            kv_cache_utils.init_none_hash(hash_fn)
            lookahead = vector.get("lookahead", 0)
            more = [lookahead] if lookahead else []
            name = f"{file} {vector['algorithm']} {'lookahead' if lookahead else ''}".strip()
            counts = found.setdefault(name, [0, 0])
            counts[1] += 1
            try:
                hasher = kv_cache_utils.get_request_block_hasher(
                    vector["block_size"], hash_fn, *more
                )
            except TypeError:
                continue  # it has no lookahead
            digests = [digest.hex() for digest in hasher(_request(vector))]
            counts[0] += digests == vector["digests"]
    return {name: f"{equal} of {num} equal" for name, (equal, num) in found.items()}


def _request(vector: dict[str, Any]) -> SimpleNamespace:
    features = [
        SimpleNamespace(
            identifier=name.encode().decode(),
            mm_position=SimpleNamespace(offset=start, length=end - start),
        )
        for name, start, end in vector.get("items", ())
    ]
    lora = vector["lora"]
    return SimpleNamespace(
        all_token_ids=vector["token_ids"],
        num_tokens=len(vector["token_ids"]),
        block_hashes=[],
        mm_features=features,
        lora_request=lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1]),
        cache_salt=vector["cache_salt"],
        prompt_embeds=None,
    )


def image_names() -> Facts:
    """The engine's name of each recorded picture."""
    import base64

    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.media.image import ImageMediaIO

    vectors = json.loads((DATA / "media_vectors.json").read_text())
    names: Facts = {}
    for number, image in enumerate(vectors["images"]):
        item = ImageMediaIO().load_bytes(base64.b64decode(image["data"]))
        named = MultiModalHasher.hash_kwargs("blake3", model_id=vectors["model"], image=item)
        names[f"{number} {image['form']} {image['mode']}"] = named
    return names


def events() -> Facts:
    """The fields of events in their order, and their tags."""
    from vllm.distributed import kv_events

    found: Facts = {"EventBatch": list(kv_events.EventBatch.__struct_fields__)}
    for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        struct = getattr(kv_events, name)
        form = "array" if struct.__struct_config__.array_like else "map"
        found[f"{name} ({form}, tag {struct.__struct_config__.tag})"] = list(
            struct.__struct_fields__
        )
    return found


def hit_lengths() -> Facts:
    """How far recorded caches are hit by the coordinator."""
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    from tests.engines import record_hit_lengths as recorder

    register_all_kvcache_specs(None)
    recorded = json.loads((recorder.FIXTURES / "coordinator-0.32.0.json").read_text())
    equal = num = 0
    parts = iter(recorded)
    for name, (unit, specs) in recorder.LAYOUTS.items():
        size = unit or math.gcd(*(spec.block_size for spec in specs))
        for eagle in (False, True):
            made = json.loads(recorder.record(name, size, specs, eagle))
            before = next(parts)["cases"]
            num += len(before)
            equal += sum(a == b for a, b in zip(made["cases"], before, strict=True))
    return {"coordinator": f"{equal} of {num} equal"}


def store_keys() -> Facts:
    """The keys and masks of Mooncake's connector, and what it looks up."""
    sys.path.insert(0, str(ROOT / "tests" / "fixtures" / "pool"))
    import make_listings

    recorded = json.loads((ROOT / "tests/fixtures/pool/listings-0.32.0.json").read_text())
    made = [make_listings.make(name, shape) for name, shape in make_listings.SHAPES.items()]
    equal = sum(json.loads(json.dumps(a)) == b for a, b in zip(made, recorded, strict=True))
    return {"listings": f"{equal} of {len(recorded)} equal"}


def flags() -> list[str]:
    """Every flag of the server."""
    try:
        from vllm.entrypoints.common import cli_args
    except ImportError:  # until 0.32
        from vllm.entrypoints.launchers import cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    return sorted(each for action in parser._actions for each in action.option_strings)


def routes() -> list[str]:
    """Every route in the sources of the server, dev routes among them."""
    texts = _sources("entrypoints")
    pattern = r'\.(?:get|post|put|delete|route|api_route|add_api_route|websocket)\(\s*"(/[^"]*)"'
    return sorted({path for text in texts for path in re.findall(pattern, text)})


def metrics() -> list[str]:
    """Every metric in the sources."""
    return sorted({m for text in _sources("") for m in re.findall(r'"(vllm:[a-z0-9_]+)"', text)})


def request_fields() -> Facts:
    """The fields of each API's requests."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    models = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest)
    return {model.__name__: sorted(model.model_fields) for model in models}


def registries() -> Facts:
    """What has rules of its own, by name."""
    from vllm.config import speculative
    from vllm.reasoning import _REASONING_PARSERS_TO_REGISTER
    from vllm.renderers.registry import _VLLM_RENDERERS
    from vllm.tokenizers.registry import _VLLM_TOKENIZERS
    from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER

    modes = re.findall(
        r'tokenizer_mode = "([a-z0-9_]+)"', "".join(_sources("config", only="model.py"))
    )
    return {
        "tokenizers": sorted(_VLLM_TOKENIZERS),
        "renderers": sorted(_VLLM_RENDERERS),
        "modes by architecture": sorted(set(modes)),
        "reasoning parsers": sorted(_REASONING_PARSERS_TO_REGISTER),
        "tool parsers": sorted(_TOOL_PARSERS_TO_REGISTER),
        "hash algorithms": sorted(get_args(_prefix_hashes())),
        "speculative methods": sorted(_words(speculative.SpeculativeMethod)),
        "speculative settings": sorted(speculative.SpeculativeConfig.__dataclass_fields__),
    }


def _prefix_hashes() -> Any:
    from vllm.config import cache

    return cache.PrefixCachingHashAlgo


def _words(hint: Any) -> set[str]:
    """List the texts in nested Literals."""
    return {
        word
        for each in get_args(hint)
        for word in ([each] if isinstance(each, str) else _words(each))
    }


def texts() -> list[str]:
    """Which answers' words are in the sources: what is read in errors and by probes."""
    sources = _sources("")
    return sorted(each for each in TEXTS if any(each in text for text in sources))


def _sources(below: str, only: str = "*.py") -> list[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / below
    skipped = ("model_executor", "benchmarks", "kernels", "third_party")
    return [
        path.read_text()
        for path in sorted(folder.rglob(only))
        if not any(part in skipped for part in path.relative_to(folder).parts)
    ]


KINDS: Final[tuple[Callable[[], Any], ...]] = (
    hashes, image_names, events, hit_lengths, store_keys, flags, routes, metrics, request_fields,
    registries, texts,
)  # fmt: skip


def main() -> None:
    """Write all facts to the file that is named; stdout is vLLM's."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    random.seed(1)
    found: Facts = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for kind in KINDS:
            try:
                found[kind.__name__] = kind()
            except Exception as exc:
                found[kind.__name__] = f"{type(exc).__name__}: {exc}"
    Path(sys.argv[1]).write_text(json.dumps(found))
    os._exit(0)  # vLLM's threads would linger


if __name__ == "__main__":
    main()
