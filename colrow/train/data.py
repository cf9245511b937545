"""Training data: text, JSONL and conversations (lines.py) become rows of token ids with labels. Running text is cut into rows.

Loss is asked for where the model should learn: all of a text, the completion, what the assistant says (with the token that ends its turn).
Several short documents share a row (`pack`), each with positions of its own from 0 on; transformers makes the attention mask from those, so
that no document sees another. Everything here is a function of the file and the settings: all ranks make the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from . import lines
from .lines import Piece, Said
from .step import IGNORED


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, its label: the id itself or IGNORED."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """Documents side by side. `positions` start again at 0 with each; the first token of each has no label (nothing before predicts it)."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    positions: tuple[int, ...]


def read(path: Path, tokenizer: Any, length: int, tell: Callable[[str], None] = lambda words: None) -> list[Document]:
    """The documents of a file, none longer than `length` tokens. UserError names the line that cannot be used. `tell` is told in words
    what of the file is not learned: ends that were cut off, documents in which nothing is left to learn."""
    out: list[Document] = []
    ended, empty = 0, 0
    for said in lines.read(path):
        pieces = tuple(_turns(said, tokenizer)) if said.messages else said.pieces
        whole = _tokens(tokenizer, pieces, begin=not said.messages)
        running = all(learn for _, learn in pieces)
        parts = list(_cut(whole, length)) if running else [Document(whole.ids[:length], whole.labels[:length])]
        kept = [part for part in parts if any(label != IGNORED for label in part.labels[1:])]
        out += kept
        ended += bool(kept) and not running and len(whole.ids) > length
        empty += not kept
    if not out:
        raise UserError(f"{path} has nothing to learn from", f"no document with a second token within {length}", lines.FORMS)
    if ended:
        tell(f"{ended} longer than {length} tokens, their ends are not learned")
    if empty:
        tell(f"{empty} left out, nothing to learn within {length} tokens")
    return out


def _turns(said: Said, tokenizer: Any) -> Iterator[Piece]:
    """The conversation as the tokenizer's template writes it, cut where the assistant begins and ends to speak."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"{said.where} is a conversation, and the model has no chat template", works='{"text": ...}')
    written = ""

    def templated(count: int, tools: Sequence[Any], **options: Any) -> str:
        return tokenizer.apply_chat_template(list(said.messages[:count]), tools=list(tools) or None, tokenize=False, **options)

    for at, message in enumerate(said.messages):
        if message["role"] != "assistant":
            continue
        try:
            asked = templated(at, said.tools, add_generation_prompt=True)
            answered = templated(at + 1, said.tools)
            if said.tools and not written and answered == templated(at + 1, ()):
                raise UserError(
                    f"{said.where} has tools, and the model's chat template says nothing of them", works="a model made for tools"
                )
        except UserError:
            raise
        except Exception as error:  # templates raise what they like
            raise UserError(
                f"{said.where}: the chat template refuses the conversation", str(error), "roles user and assistant in turn"
            ) from error
        if not (asked.startswith(written) and answered.startswith(asked)):
            raise UserError(
                f"{said.where}: the chat template rewrites what was said before", message["role"], "one question and one answer a line"
            )
        yield asked[len(written) :], False
        yield answered[len(asked) :], True
        written = answered


def _tokens(tokenizer: Any, pieces: Sequence[Piece], begin: bool) -> Document:
    """Each piece by itself, as it is when text is generated after a prompt. Plain text (`begin`) gets the ids that begin and end a text."""
    ids: list[int] = []
    labels: list[int] = []
    for number, (text, learn) in enumerate(pieces):
        new = list(tokenizer(text, add_special_tokens=begin and number == 0, verbose=False)["input_ids"])  # no word about its length
        ids += new
        labels += new if learn else [IGNORED] * len(new)
    end = tokenizer.eos_token_id
    if begin and end is not None and (not ids or ids[-1] != end):
        ids.append(end)
        labels.append(end)
    return Document(tuple(ids), tuple(labels))


def _cut(document: Document, length: int) -> Iterator[Document]:
    for at in range(0, len(document.ids), length):
        yield Document(document.ids[at : at + length], document.labels[at : at + length])


def pack(documents: Sequence[Document], length: int, together: bool = True) -> list[Row]:
    """Rows of at most `length` tokens, in the documents' order; with `together` False one document a row."""
    rows: list[Row] = []
    waiting: list[Document] = []
    for document in documents:
        if waiting and (not together or sum(len(d.ids) for d in waiting) + len(document.ids) > length):
            rows.append(_row(waiting))
            waiting = []
        waiting.append(document)
    return [*rows, _row(waiting)] if waiting else rows


def _row(documents: Sequence[Document]) -> Row:
    ids = tuple(i for d in documents for i in d.ids)
    labels = tuple(x for d in documents for x in (IGNORED, *d.labels[1:]))
    return Row(ids, labels, tuple(p for d in documents for p in range(len(d.ids))))


def batch(rows: Sequence[Row], padding: int, packed: bool, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Rows side by side, padded at the end: input_ids, labels and, for packed rows, position_ids, else attention_mask; each [B, S].

    In packed rows the padding is a document of its own, which no other sees.
    """
    width = max(len(row.ids) for row in rows)
    out = {
        "input_ids": [[*row.ids, *[padding] * (width - len(row.ids))] for row in rows],
        "labels": [[*row.labels, *[IGNORED] * (width - len(row.ids))] for row in rows],
    }
    if packed:
        out["position_ids"] = [[*row.positions, *range(width - len(row.ids))] for row in rows]
    else:
        out["attention_mask"] = [[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows]
    return {key: torch.tensor(value, device=device) for key, value in out.items()}


def order(rows: int, epoch: int, seed: int) -> list[int]:
    """The order of an epoch: a function of seed and epoch alone, so a resumed run goes on where it was."""
    draw = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(rows, generator=draw).tolist()


def window(rows: Sequence[Row], step: int, size: int, seed: int) -> list[Row]:
    """The rows of a step (from 0 on): `size` of them, but for an epoch's last window, which has what is left."""
    per_epoch = -(-len(rows) // size)
    epoch, at = divmod(step, per_epoch)
    return [rows[i] for i in order(len(rows), epoch, seed)[at * size : (at + 1) * size]]
