"""Decide whether a model is tokenized here, by evidence that engines have the same tokens.

Equal counts prove nothing: releases of a tokenizers library have split `2024` as `202|4` and as
`2|024`. So engines are asked for the ids of texts and chats (`router.discovery.model_watch` asks).
The texts are this router's own, so they may be logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from router.base.backoff import Suspension

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


_MIN_AGAINST: Final = 2  # replicas, if several serve the model
_PAUSE_S: Final = (30.0, 3600.0)
_NUM_PROVEN: Final = 100  # agreeing answers in a row, after which the pause is short again


class _Evidence:
    """The evidence of one replica.

    agrees: Whether its last answer agreed; None: it has not answered.
    is_compared: Whether the ids of its process were compared with ours.
    difference: The result of the comparison; None: the ids are the same.
    """

    __slots__ = ("agrees", "difference", "is_compared")

    def __init__(self) -> None:
        self.agrees: bool | None = None
        self.is_compared = False
        self.difference: Difference | None = None


class TokenTrust:
    """Counts agreement with the replicas of one model.

    A prompt's tokens must be the engine's, else they match no blocks. Answers are votes of
    replicas, not failures in a row: a replica that disagrees alone is wrong itself. If several
    disagree, and more than agree, our tokens are wrong: the engine tokenizes for a pause, which
    doubles each time. Then our tokens are tried again.

    Compared ids count more than counts of tokens. A process goes on making the ids that it makes,
    so nothing is tried again while more than half of the processes make other ids.

    proven: Requests that engines accepted and counted as we do, since the model was last suspect:
        pairs of an API's name and whether the request had a tool choice.
    reason: Why the engine tokenizes; None: it need not.
    """

    __slots__ = (
        "_num_in_a_row",
        "_num_serving",
        "_reason",
        "_replicas",
        "_suspension",
        "num_matches",
        "num_proofs",
        "proven",
        "reason",
    )

    def __init__(self) -> None:
        self.num_matches = 0
        self.num_proofs = 0
        self.proven: set[tuple[str, bool]] = set()
        self.reason: str | None = None
        self._reason: str | None = None
        self._replicas: dict[str, _Evidence] = {}
        self._num_serving = 0
        self._num_in_a_row = 0
        self._suspension = Suspension(*_PAUSE_S)

    def disagrees(self, replica: str) -> bool:
        """Return whether the replica's last answer had other tokens, or it makes other ids."""
        known = self._replicas.get(replica)
        return known is not None and (known.agrees is False or known.difference is not None)

    def differences(self) -> list[tuple[str, str]]:
        """List the replicas that make other ids, and what is different."""
        found = ((name, known.difference) for name, known in self._replicas.items())
        return [(name, difference.what) for name, difference in found if difference is not None]

    def has_compared(self, replica: str) -> bool:
        """Return whether the ids of the replica's process were compared with ours."""
        return replica in self._replicas and self._replicas[replica].is_compared

    def observe_ids(
        self, replica: str, difference: Difference | None, *, num_serving: int = 1
    ) -> None:
        """Record the result of a comparison of ids.

        Args:
            difference: None: they are the same.
            num_serving: Replicas that serve the model now.
        """
        known = self._evidence(replica)
        known.is_compared, known.difference = True, difference
        self._num_serving = max(num_serving, self._num_compared())
        self._decide()
        if difference is not None:
            self.proven.clear()

    def observe_usage(
        self, replica: str, num_tokens: int, prompt_tokens: int, *, has_others: bool, now_s: float
    ) -> bool:
        """Compare our count of a prompt with a replica's `usage.prompt_tokens`.

        Only for prompts that were tokenized here. Returns whether the counts agree.

        Args:
            has_others: Other replicas serve the model, too.
        """
        is_match = num_tokens == prompt_tokens
        reason = f"counted {num_tokens} prompt tokens, the engine {prompt_tokens}"
        self._judge(replica, is_match, reason, has_others=has_others, now_s=now_s)
        self._count(is_match)
        return is_match

    def forget(self, replica: str) -> None:
        """Drop the evidence of a replica that is gone, or is another process now."""
        known = self._replicas.pop(replica, None)
        if known is not None and known.is_compared:
            self._num_serving = self._num_compared()
            self._decide()

    def observe_proof(self, is_proven: bool, *, now_s: float) -> bool:
        """Record the result of a full encode of a prompt that was encoded in pieces."""
        self.num_proofs += 1
        self._count(is_proven)
        if not is_proven:
            self._end("a full encode gave other tokens than the pieces", now_s)
        return is_proven

    def try_again(self, now_s: float) -> bool:
        """Use our tokens again if the pause is over; return whether they are used from now on."""
        if self._reason is None or self._suspension.is_on(now_s):
            return False
        self._reason = None
        for known in self._replicas.values():
            known.agrees = None
        self._decide()
        return self.reason is None

    def start_again(self) -> None:
        """Drop all evidence: tokens are made in another way from now on."""
        self._reason = None
        self._replicas.clear()
        self._decide()

    def _decide(self) -> None:
        """Set `reason` by all evidence: after each change of it, as each prompt reads it."""
        found = [each.difference for each in self._replicas.values() if each.difference is not None]
        self.reason = found[-1].what if 2 * len(found) > self._num_serving else self._reason

    def _evidence(self, replica: str) -> _Evidence:
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = _Evidence()
        return known

    def _num_compared(self) -> int:
        return sum(each.is_compared for each in self._replicas.values())

    def _judge(
        self, replica: str, is_match: bool, reason: str, *, has_others: bool, now_s: float
    ) -> None:
        """Record a replica's evidence; end local tokens if enough replicas are against them."""
        self._evidence(replica).agrees = is_match
        if is_match:
            return
        votes = [each.agrees for each in self._replicas.values() if each.agrees is not None]
        num_against = votes.count(False)
        if num_against >= (_MIN_AGAINST if has_others else 1) and 2 * num_against > len(votes):
            self._end(reason, now_s)

    def _count(self, is_match: bool) -> None:
        if not is_match:
            self._num_in_a_row = 0
            return
        self.num_matches += 1
        self._num_in_a_row += 1
        if self._num_in_a_row >= _NUM_PROVEN:
            self._suspension.reset()

    def _end(self, reason: str, now_s: float) -> None:
        if self._reason is None:  # earlier requests may still come to the same end
            self._reason = reason
            self._decide()
            self.proven.clear()
            self._suspension.begin(now_s)
