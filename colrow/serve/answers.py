"""Answers: OpenAI's response bodies, whole and in chunks, from what the engine puts out. No HTTP here."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..engine.request import Output, Request, TokenLogprob
from .protocol import Refused


@dataclass
class Choice:
    """One sequence as it grows."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    shared: int = 0

    def add(self, output: Output) -> None:
        self.text += output.text
        self.tokens += len(output.tokens)
        self.finish = output.finish
        self.shared += output.shared
        self.logprobs += [*output.prompt_logprobs, *output.logprobs]


@cache
def byte_names() -> dict[str, int]:
    """The characters by which byte-level vocabularies name the 256 bytes: printable ones by themselves, the others from U+0100 on, in
    order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def token_bytes(tokenizer: Any, token: int, name: str) -> bytes:
    """The bytes that the token stands for. A part of a character has no text, but its name in the vocabulary tells them: <0xE2>, or one
    character a byte."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if name != piece or "\ufffd" not in tokenizer.decode([token], skip_special_tokens=False):
        return name.encode()
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
        return bytes.fromhex(found[1])
    names = byte_names()
    return bytes(names[c] for c in piece) if all(c in names for c in piece) else name.encode()


def check(output: Output) -> None:
    """Refused where a sequence ended in a way that is no answer."""
    if output.finish == "error":
        raise Refused(output.error, 500, code="engine_error")
    if output.finish == "timeout":
        raise Refused("the request took longer than the server allows", 504, code="timeout")


class Writer:
    """Bodies of one HTTP request: `chat` or plain completions, of `sent` sequences. With `echo` the prompts' texts come first."""

    def __init__(self, model: str, tokenizer: Any, chat: bool, sent: Sequence[Request], echo: Sequence[str] = (), n: int = 1) -> None:
        self.chat, self.sent, self.n = chat, sent, n
        self._tokenizer, self._echo = tokenizer, echo
        self._model, self._created = model, int(time.time())
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._offset = [0] * len(sent)  # of the next token's text, for text_offset

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        rows = []
        for at, choice in enumerate(choices):
            row: dict[str, Any] = {"index": at, "finish_reason": choice.finish, "logprobs": self._logprobs(at, choice.logprobs)}
            if self.chat:
                row["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                row["text"] = self.echo(at) + choice.text
            rows.append(row)
        return {**self._head("chat.completion" if self.chat else "text_completion"), "choices": rows, "usage": self.usage(choices)}

    def opening(self, at: int) -> dict[str, Any] | None:
        """The chunk before the first token: the role, or the prompt that is echoed; None where there is neither."""
        if self.chat:
            return self._chunk({"index": at, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})
        echo = self.echo(at)
        return self._chunk({"index": at, "text": echo, "logprobs": None, "finish_reason": None}) if echo else None

    def piece(self, at: int, output: Output) -> dict[str, Any] | None:
        """The chunk of an output; None where it has nothing to show (a token whose text is held back)."""
        logprobs = self._logprobs(at, [*output.prompt_logprobs, *output.logprobs])
        if not output.text and output.finish is None and logprobs is None:
            return None
        row: dict[str, Any] = {"index": at, "logprobs": logprobs, "finish_reason": output.finish}
        if self.chat:
            row["delta"] = {"content": output.text} if output.text or logprobs else {}
        else:
            row["text"] = output.text
        return self._chunk(row)

    def last(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk that has the usage alone."""
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [], "usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prompt = sum(len(request.ids) for request in self.sent[:: self.n])
        new = sum(choice.tokens for choice in choices)
        cached = {"cached_tokens": sum(choice.shared for choice in choices[:: self.n])}
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, "prompt_tokens_details": cached}

    def echo(self, at: int) -> str:
        return self._echo[at // self.n] if self._echo else ""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [row]}

    def _logprobs(self, at: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.sent[at].logprobs is None or not entries:
            return None
        if self.chat:
            rows = []
            for entry in entries:
                top = [self._named(token, value) for token, value in entry.top]
                rows.append({**self._named(entry.token, entry.logprob or 0.0), "top_logprobs": top})
            return {"content": rows, "refusal": None}
        names = [self.name(entry.token) for entry in entries]
        offsets = []
        for name in names:
            offsets.append(self._offset[at])
            self._offset[at] += len(name)
        return {
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [None if entry.logprob is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Name -> log-probability of the likeliest tokens and of the token itself. Among look-alikes the likelier keeps the name."""
        found: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob or 0.0)):
            name = self.name(token)
            if token != entry.token and name == self.name(entry.token):
                name = f"token_id:{token}"
            found.setdefault(name, value)
        return found

    def _named(self, token: int, value: float) -> dict[str, Any]:
        name = self.name(token)
        return {"token": name, "logprob": value, "bytes": list(token_bytes(self._tokenizer, token, name))}

    def name(self, token: int) -> str:
        """A token in words: its text, or its name in the vocabulary where it is only a part of a character."""
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text or not text else text
