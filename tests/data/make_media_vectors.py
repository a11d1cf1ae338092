"""Name images and hash the blocks behind them with vLLM's own functions.

    PYTHON_WITH_VLLM tests/data/make_media_vectors.py > tests/data/media_vectors.json

`images`: a picture in base64 and vLLM's identifier of it, for every mode that clients send.
`chains`: the digests of prompts with items at random places, as its engine core hashes them.
"""

import base64
import io
import json
import os
import random
import sys
from itertools import product
from types import SimpleNamespace

import vllm
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media.image import ImageMediaIO
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

MODEL = "/models/a-model"
MODES = {
    "PNG": ("RGB", "RGBA", "P", "L", "LA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L", "RGB"),
    "BMP": ("RGB",),
}


def pictures(rng):
    for form, modes in MODES.items():
        for mode, size in product(modes, ((3, 2), (9, 7))):
            picture = Image.new("RGB", size)
            picture.putdata([tuple(rng.randbytes(3)) for _ in range(size[0] * size[1])])
            if mode in ("RGBA", "LA"):
                picture.putalpha(Image.new("L", size, 77))
            if mode == "I;16":
                picture = picture.convert("L")
            picture = picture.convert(mode)
            for options in ({}, {"lossless": True}) if form == "WEBP" else ({},):
                data = io.BytesIO()
                picture.save(data, form, **options)
                yield form, mode, data.getvalue()
    turned = Image.new("RGB", (3, 2), "red")
    exif = turned.getexif()
    exif[0x0112] = 6  # lies on its side
    for form in ("JPEG", "PNG", "WEBP"):
        data = io.BytesIO()
        turned.save(data, form, exif=exif)
        yield form, "turned", data.getvalue()
    data = io.BytesIO()
    turned.save(data, "JPEG", progressive=True)
    yield "JPEG", "progressive", data.getvalue()
    data = io.BytesIO()
    turned.save(data, "PNG", transparency=(255, 0, 0))
    yield "PNG", "tRNS", data.getvalue()


def images(rng):
    for form, mode, data in pictures(rng):
        item = ImageMediaIO().load_bytes(data)
        yield {
            "form": form,
            "mode": mode,
            "data": base64.b64encode(data).decode(),
            "identifier": MultiModalHasher.hash_kwargs("blake3", model_id=MODEL, image=item),
        }


def request(items, lora, salt):
    """Make what generate_block_hash_extra_keys reads of a Request."""
    features = [
        SimpleNamespace(
            identifier=name.encode().decode(),  # decoded from a message: an object of its own
            mm_position=SimpleNamespace(offset=start, length=end - start),
        )
        for name, start, end in items
    ]
    lora_request = lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1])
    return SimpleNamespace(
        mm_features=features, lora_request=lora_request, cache_salt=salt, prompt_embeds=None
    )


def digests(hash_fn, token_ids, block_size, made):
    """Chain the prompt's blocks as vllm/v1/core/kv_cache_utils.py, get_request_block_hasher."""
    parent, result, item = None, [], 0
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        extra, item = generate_block_hash_extra_keys(made, start, end, item)
        parent = hash_block_tokens(hash_fn, parent, token_ids[start:end], extra)
        result.append(parent.hex())
    return result


def chains(rng):
    os.environ.pop("PYTHONHASHSEED", None)
    for algorithm, _ in product(("sha256", "sha256_cbor"), range(30)):
        hash_fn = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(hash_fn)
        pieces, items, num_tokens = [], [], 0
        for _ in range(rng.randrange(1, 5)):
            text = rng.randrange(0, 12)
            length = rng.choice((1, 2, 5, 16, 37))
            start = num_tokens + text
            items.append((rng.choice(("a" * 64, "b" * 64, "own")), start, start + length))
            pieces.append([text, length])
            num_tokens = start + length
        token_ids = [rng.randrange(1 << 18) for _ in range(num_tokens + rng.randrange(20))]
        lora = rng.choice((None, ("sql", "/adapters/sql")))
        salt = rng.choice((None, "t1"))
        block_size = rng.choice((1, 4, 16, 32))
        yield {
            "algorithm": algorithm,
            "block_size": block_size,
            "token_ids": token_ids,
            "items": items,
            "lora": lora,
            "cache_salt": salt,
            "digests": digests(hash_fn, token_ids, block_size, request(items, lora, salt)),
        }


rng = random.Random(11)
made_of = {"images": list(images(rng)), "chains": list(chains(rng))}
for name, made in made_of.items():
    lines = ",\n".join(json.dumps(vector) for vector in made)
    head = f'{{"vllm": "{vllm.__version__}", "model": "{MODEL}",' if name == "images" else ","
    sys.stdout.write(f'{head} "{name}": [\n{lines}\n]')
sys.stdout.write("}\n")
