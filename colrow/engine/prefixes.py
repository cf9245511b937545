"""Prefixes: which beginnings of prompts are kept for later requests. Rank 0's alone, and plain Python; the keys and values themselves are
in blocks.py, on every rank.

A prompt is computed in pieces whose borders depend on nothing but the position (`next_cut`). So what a piece computes depends on the tokens
up to its end alone, to the bit, and can stand for the same piece of another prompt that begins with the same tokens. A kept piece has a
number, and hangs on the piece before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

SMALLEST = 64  # positions of a piece at the beginning of a prompt


def next_cut(at: int, most: int) -> int:
    """The end of the piece that begins at `at`: 64, 128, 192, 256, 384, 512, 768, ...: pieces of at least half of the largest power of two
    before them, so that of two prompts with a common beginning at least two thirds are shared, and at most `most` positions.

    >>> [next_cut(at, 256) for at in (0, 64, 128, 192, 256, 384, 512, 768)]
    [64, 128, 192, 256, 384, 512, 768, 1024]
    """
    size = _size(at, most)
    return (at // size + 1) * size


def last_cut(at: int, most: int) -> int:
    """Where the piece begins that position `at` lies in.

    >>> [last_cut(at, 256) for at in (0, 63, 64, 200, 300, 512, 700)]
    [0, 0, 64, 192, 256, 512, 512]
    """
    return at // _size(at, most) * _size(at, most)


def _size(at: int, most: int) -> int:
    return min(max(1 << max(at.bit_length() - 2, 0), SMALLEST), most)


@dataclass
class Piece:
    """`key`: its number, `parent` that of the piece before it (0: it begins a prompt); `children`: pieces that hang on it."""

    key: int
    parent: int
    tokens: tuple[int, ...]
    children: int = 0


class Prefixes:
    """Pieces by what they hold, the longest unused first."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, tuple[int, ...]], Piece] = {}  # in order of use
        self._pieces: dict[int, Piece] = {}
        self._next = 1
        self.positions = 0  # of all pieces together

    def find(self, parent: int, tokens: Sequence[int]) -> int:
        """The number of the piece with these tokens after `parent`, 0 where it is not kept. It counts as used."""
        place = (parent, tuple(tokens))
        piece = self._found.pop(place, None)
        if piece is None:
            return 0
        self._found[place] = piece
        return piece.key

    def add(self, parent: int, tokens: Sequence[int]) -> int:
        """A new piece's number. `parent` is 0 or kept."""
        piece = Piece(self._next, parent, tuple(tokens))
        self._next += 1
        self._found[parent, piece.tokens] = self._pieces[piece.key] = piece
        self.positions += len(piece.tokens)
        if parent:
            self._pieces[parent].children += 1
        return piece.key

    def keeps(self, key: int) -> bool:
        return key in self._pieces

    def forget(self, positions: int, but: Collection[int] = ()) -> Iterator[int]:
        """Forgets pieces, longest unused first and never one that others hang on, until so many positions are free or none is left; their
        numbers. Those in `but` stay."""
        while positions > 0:
            piece = next((p for p in self._found.values() if not p.children and p.key not in but), None)
            if piece is None:
                return
            del self._found[piece.parent, piece.tokens], self._pieces[piece.key]
            if piece.parent:
                self._pieces[piece.parent].children -= 1
            self.positions -= len(piece.tokens)
            positions -= len(piece.tokens)
            yield piece.key
