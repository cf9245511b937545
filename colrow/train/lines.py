"""What a file of training data says, before there is a tokenizer: its documents as text, every line of it looked at.

    F.txt       running text
    F.jsonl     one document a line: {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [{"role": ..., "content": ...}, ...]}

Imports nothing heavy: a command looks at the data with it before it starts a rank. Not here: tokens and rows (data.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError

Piece = tuple[str, bool]  # text, and whether the model should learn to say it
FORMS = 'lines such as {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'


@dataclass(frozen=True)
class Said:
    """One document: pieces of text, or the messages of a conversation, in which the assistant speaks. `where`: the file and the line."""

    where: str
    pieces: tuple[Piece, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()

    @property
    def teaches(self) -> bool:
        """Whether there is something that the model should learn to say."""
        return bool(self.messages) or any(text.strip() for text, learn in self.pieces if learn)


def read(path: Path) -> list[Said]:
    """The file's documents. UserError naming the line that cannot be used, or where there is nothing to learn from."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the data cannot be read", f"{path}: {error}", "a text file or JSONL in UTF-8") from error
    if path.suffix not in (".jsonl", ".json"):
        out = [Said(str(path), ((text, True),))]
    else:
        out = [_said(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not any(said.teaches for said in out):
        raise UserError(f"{path} has nothing to learn from", f"{len(text)} characters", FORMS)
    return out


def _said(line: str, where: str) -> Said:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON", str(error), FORMS) from error
    match entry:
        case {"messages": [_, *_] as messages}:
            return Said(where, messages=_conversation(messages, where))
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Said(where, ((prompt, False), (completion, True)))
        case {"text": str(text)}:
            return Said(where, ((text, True),))
    raise UserError(f"{where} has no text that colrow knows", sorted(entry) if isinstance(entry, dict) else type(entry).__name__, FORMS)


def _conversation(messages: list[Any], where: str) -> tuple[Mapping[str, Any], ...]:
    works = 'messages such as {"role": "assistant", "content": "..."}'
    wrong = next((m for m in messages if not (isinstance(m, dict) and isinstance(m.get("role"), str))), None)
    if wrong is not None:
        raise UserError(f"{where} has a message without a role", wrong, works)
    if not any(m["role"] == "assistant" for m in messages):
        raise UserError(f"{where} is a conversation in which the assistant says nothing", works='a message with "role": "assistant"')
    return tuple(messages)
