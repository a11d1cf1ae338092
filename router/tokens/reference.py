"""Make a prompt's token ids as the engine does: whole, by `tokenizers`, without our shortcuts.

Everything that `prompter` makes is compared with these.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Sequence

from router.api.openai import ChatRequest, CompletionRequest, TokenIds
from router.tokens.encoders import ChatEncoder, PlainEncoder
from router.tokens.media import MediaBook, MediaKind, tokens_between
from router.tokens.memory import Tokens
from router.tokens.panics import is_failure
from router.tokens.renderer import Renderer


class Reference:
    """Makes the ids of one model's prompts, even if its tokens are suspect.

    Args: as of `Prompter`.

    Raises: as `Prompter.plan_chat` and `plan_completion`.
    """

    __slots__ = ("_chat_encoder", "_encoder", "_media", "_renderer")

    def __init__(
        self,
        encoder: PlainEncoder,
        renderer: Renderer,
        chat_encoder: ChatEncoder,
        media: MediaBook,
    ) -> None:
        self._encoder = encoder
        self._renderer = renderer
        self._chat_encoder = chat_encoder
        self._media = media

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """Return a chat's ids."""
        return self._chat_ids(request, self._renderer)

    def text_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids."""
        return self._encoder.encode_whole(text, add_special_tokens=add_special_tokens).tolist()

    def media_ids(
        self, request: ChatRequest, kind: MediaKind, ids: Sequence[int]
    ) -> TokenIds | None:
        """Find an engine's tokens for a request's one item; None: not certain."""
        shown = self._media.placeholders.get(kind)
        if shown is None:
            return None
        renderer = self._renderer
        text = renderer.render(renderer.adapted(request), by_the_book=True)
        ours = self._encoder.encode_whole(text, add_special_tokens=False)
        return tokens_between(ids, ours, shown.token_id)

    def shown(self, ids: Sequence[int], text: str) -> list[str]:
        """Write the tokens of a text so that they can be read: as text, else as numbers."""
        try:
            texts = self._encoder.texts_of(ids)
        except BaseException as exc:  # ids of another vocabulary
            if not is_failure(exc):
                raise
            texts = []
        return texts if "".join(texts) == text else [str(each) for each in ids]

    def proves(self, request: ChatRequest | CompletionRequest, tokens: Tokens) -> bool:
        """Encode a prompt whole and compare; off the loop (about 150 ms).

        The verdict is for `Prompter.observe_proof`, on the loop. Prompts of ids prove nothing:
        True.
        """
        ids = tokens.ids()
        if isinstance(request, ChatRequest):
            if self.chat_ids(request) == ids:
                return True
            return self._renderer.is_dated and self._chat_ids(request, self._yesterday()) == ids
        text = request.prompts[0]
        return not isinstance(text, str) or self.text_ids(text, request.add_special_tokens) == ids

    def _chat_ids(self, request: ChatRequest, renderer: Renderer) -> list[int]:
        text = renderer.render(renderer.adapted(request), by_the_book=True)
        special = request.add_special_tokens
        return self._chat_encoder.encode_whole(text, add_special_tokens=special).tolist()

    def _yesterday(self) -> Renderer:
        """Return a renderer of the day before: a prompt may be proven after midnight."""
        renderer = copy.copy(self._renderer)
        today = renderer.today
        renderer.today = lambda: today() - datetime.timedelta(days=1)
        return renderer
