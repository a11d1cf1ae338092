"""Texts and chats to compare an engine's token ids with ours, and the message of a difference.

Asking engines is in `router.discovery.model_watch`. Equal counts prove nothing: releases of a
tokenizers library have split `2024` as `202|4` and as `2|024`. The texts are this router's own, so
they may be logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct

TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "digits": (
        *("1", "12", "123", "2024", "12345", "123456", "1234567", "12345678"),
        *("a2024b", "v1.23.456", "1,234,567.89", "0x1F", "3.14e-10", "٣٤٥٦", "１２３４", "½Ⅷ²"),
    ),
    "punctuation": (
        *("...", "?!?!", "))];", "=>->||&&", "#$%&*", "“quoted” — dash…", "«»", "、。！", "!!!!!!"),
        *("'''", '"""', "--flag=value", "a_b__c", "@name #tag"),
    ),
    "spaces": (
        *(
            "a b  c   d    e     f",
            " a",
            "  a",
            "a ",
            "a\tb\t\tc",
            "a\n\nb\n\n\nc",
            " \n ",
            "a\r\nb",
        ),
        *(" " * 40 + "x", "\n" * 12 + "x", "\t" * 9 + "x", "a\u00a0b\u3000c\u2003d", "\n \n  \n"),
    ),
    "contractions": ("don't I'll we've he's", "DON'T I'LL WE'VE HE'S", "l’été it’s", "o'clock'll"),
    "case": ("CamelCaseHTTPServer", "SHOUTING words", "iPhone eBay", "İstanbul ıI ß ẞ ſ"),
    "CJK": ("你好，世界", "中文English混排123", "ひらがなカタカナ漢字", "한국어 문장", "中" * 30),
    "letters": (
        *("Русский текст ё", "Ελληνικά ΣΑΣ", "العربية مُشَكَّلة", "עִבְרִית", "हिन्दी में", "ไทยภาษา"),
        "naïve façade Ærø",
    ),
    "composed characters": (
        *("\u00e9 e\u0301", "\u00c5 \u212b A\u030a", "q\u0307\u0323 q\u0323\u0307", "ﬁ ﬂ"),
        *("\uac00\u11a8 \u1100\u1161\u11a8", "\u1e9b\u0323", "a" + "\u0301" * 9),
    ),
    "emoji": ("🙂🚀", "👩‍👩‍👧 👍🏽 🇩🇪🇫🇷", "☃︎ ☃️ #️⃣", "𝒳𝕐 𐍈"),
    "code": (
        "def f(self, x: int) -> None:\n    return {'a': x ** 2}  # naïve\n\n\n\tpass\r\n",
        "    if a:\n        b()\n            c()\n",
        '{"role": "user", "n": [1, 2.5e3, null], "s": "a\\n\\u00e9 \\"q\\""}',
        "diff --git a/x.py b/x.py\n@@ -1,3 +1,4 @@\n-    old\n+\tnew\n \n",
        "https://example.org/a?b=c&d=%20#frag ~/.config C:\\Temp\\x",
        "aGVsbG8gd29ybGQhIGJhc2U2NA== 3f2a9c0e-77aa-4b1e 0xDEADBEEF",
    ),
    "special tokens": (
        *("<|im_start|>user", "a<|im_end|>b", " <|endoftext|> ", "<s> </s>", "[INST] [/INST]"),
        *("<think></think>", "<|", "|>", "<unk>", "<bos>a<eos>", "<|eot_id|>", "▁▁a"),
    ),
    "long runs": ("a" * 80, "ab" * 40, "-" * 80, "=" * 60, "1" * 40, "é" * 30),
    "invisible characters": ("\u200b\u200d", "\ufeff", "\u00ad\u202e", "\x1b[0m", "\x7f", "\ufffd"),
}
"""Texts in which tokenizers differ, by kind."""

ALL_TEXTS: Final = "\n".join(text for texts in TEXTS.values() for text in texts)

_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
CHATS: Final[tuple[dict[str, Any], ...]] = (
    {"messages": [{"role": "user", "content": "What is written on the first page?"}]},
    {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant.\n\nAnswer briefly."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("One.", "Two.")]},
            {"role": "assistant", "content": "Its title."},
            {"role": "user", "content": ALL_TEXTS},
        ]
    },
    {"messages": [{"role": "user", "content": "Look it up."}], "tools": [_TOOL]},
)
"""Chats. Other template arguments change the prompts of some. A template may refuse the later
ones."""

FLAGS: Final = (
    "if the engine has --chat-template, --default-chat-template-kwargs, "
    "--chat-template-content-format or --reasoning-effort-map, give the router the same: "
    "tokens.chat_templates, tokens.chat_template_kwargs, tokens.content_formats, "
    "tokens.reasoning_effort_maps; if its prompts contain the date, set tokens.time_zone"
)
"""The hint if an engine renders a chat as another text."""

RELEASES: Final = (
    "install the releases of transformers and tokenizers that the engine has, or name the "
    "engine's own files: tokens.models"
)
"""The hint if an engine splits a text in another way."""


class Difference(Struct, frozen=True, kw_only=True):
    """How an engine's ids differ from ours.

    of: `text`: the same text is split in another way. `chat`: a chat is rendered as another text.
    """

    of: Literal["text", "chat"]
    what: str
    hint: str

    def __str__(self) -> str:
        return self.what


def first_difference(theirs: Sequence[int], ours: Sequence[int]) -> int:
    """Return the position of the first token that differs."""
    pairs = enumerate(zip(theirs, ours, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(theirs), len(ours)))


def of_text(kind: str, text: str, theirs: Sequence[str], ours: Sequence[str]) -> Difference:
    """Describe a text that is split in another way; `theirs` and `ours`: its tokens as text."""
    shown = text if len(text) <= 40 else f"{text[:40]}…"
    return Difference(
        of="text",
        what=f"the engine splits {shown!r} ({kind}) as {_shown(theirs)}, this router as "
        f"{_shown(ours)}",
        hint=RELEASES,
    )


def _shown(tokens: Sequence[str]) -> str:
    most = 12
    return "|".join([*tokens[:most], *(["…"] if len(tokens) > most else [])])


def of_chat(theirs: Sequence[int], ours: Sequence[int]) -> Difference:
    """Describe a chat that is rendered as another text."""
    position = first_difference(theirs, ours)
    what = (
        f"the engine makes {len(theirs)} tokens of a sample chat, this router {len(ours)}; they "
        f"differ from token {position} on"
    )
    return Difference(of="chat", what=what, hint=FLAGS)


def of_refused() -> Difference:
    """Describe a chat that our template refuses but the engine's accepts."""
    return Difference(
        of="chat", what="the template here refuses a sample chat, the engine's does not", hint=FLAGS
    )
