"""Prompts: what a user gives, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError, first_line

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or a conversation: messages with "role" and "content"."""


def has_template(tokenizer: Any) -> bool:
    """Whether the model speaks in turns: its tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_text(text: str) -> str:
    """The text. UserError where it has halves of characters (lone surrogates), of which tokenizers only say that they have the wrong type:
    Python makes them of bytes that are no UTF-8, and JSON can name them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"the text is no Unicode: character {error.start} is half a character or a wrong byte"
        raise UserError(what, ascii(text)[:60], "text in UTF-8") from None
    return text


def encode(tokenizer: Any, prompt: Prompt, raw: bool = False) -> list[int]:
    """Token ids of the prompt. A text becomes the user's turn of a conversation where there is a chat template and `raw` is not set; else
    it is continued as it stands, after the beginning-of-text token where the tokenizer adds one. UserError where it is empty, no
    Unicode, refused by the template, or there is no tokenizer."""
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        return [token for token in prompt if isinstance(token, int)]
    if tokenizer is None:
        raise UserError("a text needs a tokenizer", works="token ids, or Engine(model, group, tokenizer)")
    if isinstance(prompt, str) and not prompt:
        raise UserError("the prompt is empty", works='-p "Once upon a time"')
    if isinstance(prompt, str) and (raw or not has_template(tokenizer)):
        return list(tokenizer(check_text(prompt))["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not has_template(tokenizer):
        raise UserError("the model has no chat template", works="a text prompt, or an instruct model")
    text = fill_template(tokenizer, messages)
    return list(tokenizer(check_text(text), add_special_tokens=False)["input_ids"])  # the template writes its own special tokens


def fill_template(tokenizer: Any, messages: Sequence[Any]) -> str:
    """The conversation as the model's chat template writes it. UserError where the template refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs that come with the model, and refuse roles or orders in their own ways
        raise UserError(
            "the model's chat template refuses the conversation", first_line(error), "the raw text, or messages that it takes"
        ) from error


def check_list(prompts: object) -> None:
    """A text is a sequence too, of prompts of one letter each, which nobody means."""
    if isinstance(prompts, str):
        raise UserError("a list of prompts is wanted, not one text", repr(prompts[:40]), "[text]")
