"""What vLLM's own code makes of conversations with images: ids, names, places, block digests.

    PYTHON_WITH_VLLM -m tests.tokens.record_vision DIRECTORY > tests/tokens/golden/vision.json

DIRECTORY gets the model's files; its path is part of the images' names, and recorded. Run it where
the interpreter has vLLM; no engine, no weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.tokens.vllm_routes import fingerprint
from tests.vision_model import image_part, make_vision_model, png

BLOCK_SIZE = 16
SIZES = ((30, 20), (64, 64), (200, 100), (100, 260))


def bodies(seed: int, count: int) -> list[dict[str, Any]]:
    """Make conversations that grow by a turn each, with images in some."""
    rng = random.Random(seed)
    made: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for number in range(count):
        if number % 5 == 0:
            words = " ".join(rng.choice(("You", "see", "räume", "🙂")) for _ in range(9))
            messages = [{"role": "system", "content": words}]
        text = f"turn {number} " * rng.randrange(9)
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for _ in range(rng.choice((0, 1, 1, 2))):
            image = png(*rng.choice(SIZES), rng.randrange(3), is_rgba=rng.random() < 0.3)
            named = {"uuid": f"image-{zlib.crc32(image)}"} if rng.random() < 0.2 else {}
            parts.insert(rng.randrange(len(parts) + 1), image_part(image, **named))
        messages = [*messages, {"role": "user", "content": parts}]
        made.append({"model": "tiny", "messages": messages})
        messages = [*messages, {"role": "assistant", "content": "I see. " * rng.randrange(4)}]
    return made


def as_responses(body: dict[str, Any]) -> dict[str, Any]:
    """Write a conversation as the Responses API has it; its images have no names there."""
    items: list[dict[str, Any]] = []
    for number, message in enumerate(body["messages"]):
        role, content = message["role"], message["content"]
        item = {"type": "message", "role": role, "content": content}
        if role == "assistant":
            part = {"type": "output_text", "text": content, "annotations": []}
            item |= {"id": f"msg_{number}", "status": "completed", "content": [part]}
        elif role == "user":
            item["content"] = [
                {"type": "input_text", "text": part["text"]}
                if part["type"] == "text"
                else {
                    "type": "input_image",
                    "image_url": part["image_url"]["url"],
                    "detail": ("auto", "low")[number % 2],
                }
                for part in content
            ]
        items.append(item)
    return {"model": "tiny", "input": items}


def record(directory: Path, kind: str = "idefics3", seed: int = 3, count: int = 20) -> Any:
    """Ask vLLM; only where it is installed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    make_vision_model(directory, kind)
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    arguments = EngineArgs(
        model=str(directory),
        load_format="dummy",
        enforce_eager=True,
        block_size=32,
        limit_mm_per_prompt={"image": 32},
    )
    config = arguments.create_engine_config()
    renderer = OnlineRenderer(
        config.model_config,
        renderer_from_config(config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    kv_cache_utils.init_none_hash(sha256)

    def digests(ids: list[int], names: list[str], places: list[Any]) -> list[str]:
        request = SimpleNamespace(
            mm_features=[
                SimpleNamespace(identifier=name.encode().decode(), mm_position=place)
                for name, place in zip(names, places, strict=True)
            ],
            lora_request=None,
            cache_salt=None,
            prompt_embeds=None,
        )
        parent, found, item = None, [], 0
        for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            end = start + BLOCK_SIZE
            extra, item = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, item)
            parent = kv_cache_utils.hash_block_tokens(sha256, parent, ids[start:end], extra)
            found.append(parent.hex()[-16:])
        return found

    async def entry(body: dict[str, Any]) -> dict[str, Any]:
        if "input" in body:
            asked = ResponsesRequest.model_validate(body)
            made = (await renderer.render_responses(asked)).engine_input
        else:
            chat = ChatCompletionRequest.model_validate(body)
            made = (await renderer.render_chat(chat))[1][0]
        names = made.get("mm_hashes", {}).get("image", [])
        places = made.get("mm_placeholders", {}).get("image", [])
        ids = list(made["prompt_token_ids"])
        return {
            "ids": ids,
            "names": names,
            "places": [[place.offset, place.offset + place.length] for place in places],
            "digests": digests(ids, names, places),
        }

    async def everything() -> list[dict[str, Any]]:
        return [await entry(body) for body in bodies(seed, count)]

    async def by_responses() -> list[dict[str, Any]]:
        found = [await entry(as_responses(body)) for body in bodies(seed, count)]
        return [
            {
                "ids": fingerprint(each["ids"]),
                "names": each["names"],
                "last_digest": each["digests"][-1],
            }
            for each in found
        ]

    return {
        "vllm": vllm.__version__,
        "model_id": str(directory),
        "responses": asyncio.run(by_responses()),
        "prompts": asyncio.run(everything()),
    }


if __name__ == "__main__":
    found = record(Path(sys.argv[1]), *sys.argv[2:3])
    lines = ",\n".join(json.dumps(each) for each in found.pop("prompts"))
    sys.stdout.write(f'{json.dumps(found)[:-1]}, "prompts": [\n{lines}\n]}}\n')
