"""What a file of training data says, before there is a tokenizer: its documents as text, every line of it looked at.

    F.txt       running text
    F.jsonl     one document a line: {"text": ...}, {"prompt": ..., "completion": ...} or
                {"messages": [{"role": ..., "content": ...}, ...]}, with "tools": [...] where the conversation has some; F.ndjson too
    F.json      the same, or all of them as one list

Imports nothing heavy: a command looks at the data with it before it starts a rank. Not here: tokens and rows (data.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")
Piece = tuple[str, bool]  # text, and whether the model should learn to say it
FORMS = 'lines such as {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'


@dataclass(frozen=True)
class Said:
    """One document: pieces of text, or the messages of a conversation, in which the assistant speaks, and the tools that it may use, as
    chat templates take them. `where`: the file and the line."""

    where: str
    pieces: tuple[Piece, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()

    @property
    def teaches(self) -> bool:
        """Whether there is something that the model should learn to say."""
        return bool(self.messages) or any(text.strip() for text, learn in self.pieces if learn)


def read(path: Path) -> list[Said]:
    """The file's documents. UserError naming the line that cannot be used, or where there is nothing to learn from."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the data cannot be read", f"{path}: {error}", "a text file or JSONL in UTF-8") from error
    if path.suffix in JSON_LINES:
        out = [_said(entry, where) for entry, where in _entries(path, text)]
        for said in out:
            _refuse_halves(said)
    else:
        _refuse_json_lines(path, text)
        out = [Said(str(path), ((text, True),))]
    if not any(said.teaches for said in out):
        raise UserError(f"{path} has nothing to learn from", f"{len(text)} characters", FORMS)
    return out


def _entries(path: Path, text: str) -> Iterator[tuple[Any, str]]:
    """What JSON there is in the file, and where."""
    if path.suffix == ".json" and text.lstrip().startswith("["):
        yield from ((entry, f"{path}, entry {number}") for number, entry in enumerate(_parsed(text, str(path)), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would end lines within strings too: at U+2028
        if line.strip():
            yield _parsed(line, f"{path}:{number}"), f"{path}:{number}"


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON", str(error), FORMS) from error


def _refuse_halves(said: Said) -> None:
    """UserError where JSON names half of a character, of which tokenizers only say that the text has the wrong type."""
    try:
        json.dumps((said.pieces, said.messages, said.tools), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UserError(f"{said.where} is no Unicode: it has half a character", half, "both halves, or the character itself") from None


def _refuse_json_lines(path: Path, text: str) -> None:
    """UserError where running text begins with a line that is a document as JSON: the model would learn the braces."""
    try:
        _said(json.loads(text.lstrip().partition("\n")[0]), str(path))
    except (ValueError, RecursionError, UserError):
        return
    raise UserError("JSON lines would be read as running text from a file of this name", path, "a name that ends in .jsonl")


def _said(entry: Any, where: str) -> Said:
    match entry:
        case {"messages": [_, *_] as messages}:
            return Said(where, messages=_conversation(messages, where), tools=_tools(entry.get("tools"), where))
        case {"prompt": str(prompt), "completion": str(completion)}:
            return Said(where, ((prompt, False), (completion, True)))
        case {"text": str(text)}:
            return Said(where, ((text, True),))
    raise UserError(f"{where} has no text that colrow knows", sorted(entry) if isinstance(entry, dict) else type(entry).__name__, FORMS)


def _tools(tools: Any, where: str) -> tuple[Any, ...]:
    if tools is None:
        return ()
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f"{where} has tools of another form", tools, '"tools": [{"type": "function", "function": {...}}]')
    return tuple(tools)


def _conversation(messages: list[Any], where: str) -> tuple[Mapping[str, Any], ...]:
    works = 'messages such as {"role": "assistant", "content": "..."}'
    wrong = next((m for m in messages if not (isinstance(m, dict) and isinstance(m.get("role"), str))), None)
    if wrong is not None:
        raise UserError(f"{where} has a message without a role", wrong, works)
    if not any(m["role"] == "assistant" for m in messages):
        raise UserError(f"{where} is a conversation in which the assistant says nothing", works='a message with "role": "assistant"')
    return tuple(messages)
