"""Tiny models that see, on the tokenizer of `loadtest/tiny_model`.

Idefics 3 and Qwen 2 VL see: an image becomes one run of a token in the latter; in the former tiles,
each between tokens of its own. No weights: engines run them with `--load-format dummy`. Qwen 2 VL
wants torchvision there.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any, Final

_TINY: Final = Path(__file__).resolve().parents[1] / "loadtest" / "tiny_model"
_TOKENS: Final = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_FIRST_ID: Final = 8192
_VOCABULARY: Final = 8256
_SHOWN: Final = {
    "idefics3": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}

_TEMPLATE: Final = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content %}{%- if part.type == 'image' %}"
    "SHOWN{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)

_TEXT: Final = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-06,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "idefics3": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": _FIRST_ID,
        "scale_factor": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        },
        "text_config": {"model_type": "llama", "tie_word_embeddings": False, **_TEXT},
    },
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_start_token_id": _FIRST_ID + 4,
        "vision_end_token_id": _FIRST_ID + 5,
        "image_token_id": _FIRST_ID + 6,
        "video_token_id": _FIRST_ID + 7,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": True,
        "vision_config": {
            "depth": 1,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        **_TEXT,
    },
}

_PROCESSORS: Final[dict[str, dict[str, Any]]] = {
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_image_splitting": True,
        "size": {"longest_edge": 256},
        "max_image_size": {"longest_edge": 64},
        "image_seq_len": 16,
        "do_convert_rgb": True,
        "do_pad": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_resize": True,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "qwen2_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def make_vision_model(directory: Path, kind: str = "idefics3") -> Path:
    """Write a model's files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((_TINY / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {
            "id": _FIRST_ID + position,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for position, content in enumerate(_TOKENS)
    ]
    settings = json.loads((_TINY / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    processor = _PROCESSORS[kind]
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("config.json", _CONFIGS[kind]),
        ("preprocessor_config.json", processor),
        (
            "processor_config.json",
            {"processor_class": processor["processor_class"], "image_seq_len": 16},
        ),
    ):
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(_TEMPLATE.replace("SHOWN", _SHOWN[kind]))
    return directory


def png(width: int, height: int, seed: int = 0, *, is_rgba: bool = False) -> bytes:
    """Write a picture of one colour as PNG."""
    pixel = bytes((seed % 256, seed // 256 % 256, 99, 128)[: 4 if is_rgba else 3])
    rows = (b"\0" + pixel * width) * height

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    head = struct.pack(">IIBBBBB", width, height, 8, 6 if is_rgba else 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    )


def data_url(image: bytes) -> str:
    """Write an image as clients send it."""
    return "data:image/png;base64," + base64.b64encode(image).decode()


def image_part(image: bytes, **more: Any) -> dict[str, Any]:
    """Write an image's part of a message."""
    return {"type": "image_url", "image_url": {"url": data_url(image)}, **more}
