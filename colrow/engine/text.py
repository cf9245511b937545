"""Text from tokens, piece by piece. Not here: stop strings (stopping.py), prompts (prompts.py)."""

from __future__ import annotations

from typing import Any

_UNKNOWN = "\ufffd"
_LONGEST = 4  # bytes of a UTF-8 character: after so many tokens a character is complete or will never be
_WINDOW = 16  # tokens that are decoded again at most


class TextStream:
    """A streaming detokenizer: `push(token)` returns the text that has become certain, `finish()` the rest.

    The pieces put together equal `tokenizer.decode(all tokens)` without special tokens. U+FFFD is never shown for a character whose bytes
    are spread over tokens: the piece waits until the character is there, for at most three tokens. Bytes that belong to no character come
    out as the decoder writes them (U+FFFD) and do not stall the stream. What is still incomplete at `finish()` is dropped: that is the one
    difference to decoding everything at once.

    Each push decodes only a window (the tokens of the last piece and those since), because decoders treat the first token of a text
    differently (leading spaces). The cost per token does not grow with the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens whose text is out, so that the decoder does not think that the next one begins a text
        self._waiting: list[int] = []  # tokens whose text ends with bytes that may become a character
        self._out = 0  # characters of the waiting tokens' text that are out already

    def push(self, token: int) -> str:
        self._waiting.append(token)
        piece = self._piece()
        if not piece.endswith(_UNKNOWN):
            text, self._out = piece[self._out :], 0
            # Past visible text only: special tokens have none and would make the next token the first of a text.
            self._context = self._waiting if piece else [*self._context, *self._waiting][-_WINDOW:]
            self._waiting = []
            return text
        # Byte-level decoders write one U+FFFD for an incomplete end; those that fall back to bytes write one for each byte, but after four
        # tokens without a character the bytes are known to be none. Only the last one may still begin something.
        certain = piece[:-1] if len(self._waiting) >= _LONGEST else piece.rstrip(_UNKNOWN)
        text = certain[self._out :]
        self._out = max(self._out, len(certain))
        if len(self._waiting) > _WINDOW:
            self._context, self._waiting = self._waiting[: 1 - _LONGEST], self._waiting[1 - _LONGEST :]
            self._out = max(0, len(self._piece()) - 1)
        return text

    def finish(self) -> str:
        text = self._piece()[self._out :].rstrip(_UNKNOWN)
        self._context, self._waiting, self._out = [], [], 0
        return text

    def _piece(self) -> str:
        """The text that the waiting tokens add to the context's."""
        before, both = self._decode(self._context), self._decode(self._context + self._waiting)
        return both[len(before) :] if both.startswith(before) else self._decode(self._waiting)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False) if tokens else ""
