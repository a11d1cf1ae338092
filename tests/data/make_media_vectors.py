"""Name images with vLLM's own functions.

    PYTHON_WITH_VLLM tests/data/make_media_vectors.py > tests/data/media_vectors.json

`images`: a picture in base64 and vLLM's identifier of it, for every mode that clients send.
"""

import base64
import io
import json
import random
import sys
from itertools import product

import vllm
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.media.image import ImageMediaIO

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


lines = ",\n".join(json.dumps(image) for image in images(random.Random(11)))
sys.stdout.write(f'{{"vllm": "{vllm.__version__}", "model": "{MODEL}", "images": [\n{lines}\n]}}\n')
