"""Exchange: how the ranks agree on the next tokens. Two small collectives a step.

Every rank offers its candidates (one all-gather); rank 0 picks and broadcasts [code, step number, tokens..., reasons...]. A rank that is at
another step raises RankError. Where the candidates do not reach (candidates.py), rank 0's code says so, the full logits are gathered and a
second decision follows. Bytes a step and row: 40 from each rank for greedy, 24 + 16 for each of the k candidates with top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..comm.collectives import all_gather, broadcast
from ..comm.group import Group
from ..errors import RankError
from ..partition import Partition
from .candidates import OFFER_HEAD, check, decide, offer, tables, width, winners
from .columns import LOGITS, columns, gathered
from .rules import Place, Rules
from .sampling import choose, penalize
from .settings import Sampling
from .stopping import Finish

CANDIDATES, DECISION = "engine.candidates", "engine.decision"
_NEXT, _WIDEN = 0, 1

Ends = Callable[[Sequence[int]], Sequence[Finish | None]]
"""ends(tokens) on rank 0: for each row the reason why it ends with this token, or None."""


def predicted(sampling: Sampling, rows: int, ranks: int, vocab: int) -> list[tuple[str, str, int, int]]:
    """(op, name, calls, bytes of the logical tensor) of one step in which the candidates reach. Nothing on one rank."""
    if ranks == 1:
        return []
    offers = 8 * ranks * rows * (OFFER_HEAD + 2 * width(sampling, vocab))
    return [("all_gather", CANDIDATES, 1, offers), ("broadcast", DECISION, 1, 8 * (2 + 2 * rows))]


def predicted_gather(rows: int, ranks: int, vocab: int, element: int) -> list[tuple[str, str, int, int]]:
    """What a step costs on top of `predicted` when the candidates do not reach; logits of `element` bytes each."""
    if ranks == 1:
        return []
    return [("all_gather", LOGITS, 1, rows * vocab * element), ("broadcast", DECISION, 1, 8 * (2 + 2 * rows))]


@dataclass(frozen=True)
class Agreed:
    """For each row the next token, and why the row ends if it does. `gathered`: whether the full logits were needed."""

    tokens: list[int]
    finished: list[Finish | None]
    gathered: bool = False


class Exchange:
    """One for each `generate` call. `cut` is the vocabulary's partition over the ranks; None: every rank has all logits, and rank 0's
    count. With `rules` every step asks for the full logits; `most`: new tokens that a row may have, None for no limit."""

    def __init__(
        self, group: Group, cut: Partition | None, sampling: Sampling, rules: Rules | None = None, most: int | None = None
    ) -> None:
        self.group, self.sampling, self._rules, self._most = group, sampling, Rules() if rules is None else rules, most
        self._cut = cut
        self._ids: list[torch.Tensor] = []  # of every rank's columns

    def agree(self, logits: torch.Tensor, seen: Sequence[Sequence[int]], number: int, ends: Ends) -> Agreed:
        """The same on every rank. `logits` [rows, columns of this rank]; `seen[row]`: the ids so far (for the repetition penalty and the
        rules)."""
        if not self._ids:
            self._ids = columns(self._cut, logits.shape[1], self.group.size)
        mine = self._ids[self.group.rank]
        logits = logits[:, : len(mine)].cpu()
        if not self._rules:  # else the penalty has its place among them
            logits = self._penalized(logits, mine, seen)
        count = width(self.sampling, sum(map(len, self._ids)))
        offers = offer(logits, mine, self.sampling, count, number)
        offers = all_gather(offers, self.group, CANDIDATES, 0, [len(offers)] * self.group.size)
        check(offers, self.group.size)
        found: list[int | None] = [None] * len(logits)
        if self.group.rank == 0 and not self._rules:
            found = list(self._chosen(offers, number))
        agreed = self._tell(found, number, ends)
        if agreed is not None:
            return agreed
        whole = gathered(logits, self._ids, self.group)
        if self.group.rank == 0:
            lines = self._ruled(whole, seen, number) if self._rules else whole
            found = [choose(line, self.sampling, row, number) for row, line in enumerate(lines)]
        agreed = self._tell(found, number, ends)
        assert agreed is not None
        return replace(agreed, gathered=True)

    def _chosen(self, offers: torch.Tensor, number: int) -> Sequence[int | None]:
        if self.sampling.single:
            return winners(offers, self.group.size)
        return [decide(table, self.sampling, row, number) for row, table in enumerate(tables(offers, self.group.size))]

    def _tell(self, found: Sequence[int | None], number: int, ends: Ends) -> Agreed | None:
        """Rank 0's decision on every rank; None where it asks for the full logits."""
        rows = len(found)
        message = torch.zeros(2 + 2 * rows, dtype=torch.int64)
        if self.group.rank == 0:
            tokens = [token for token in found if token is not None]
            if len(tokens) == rows:
                message = torch.tensor([_NEXT, number, *tokens, *(reason or 0 for reason in ends(tokens))])
            else:
                message[0], message[1] = _WIDEN, number
        code, at, *rest = broadcast(message, self.group, DECISION).tolist()
        if at != number:
            raise RankError(f"rank {self.group.rank} is at step {number} of the generation, rank 0 at step {at}")
        return None if code == _WIDEN else Agreed(rest[:rows], [Finish(reason) if reason else None for reason in rest[rows:]])

    def _ruled(self, whole: torch.Tensor, seen: Sequence[Sequence[int]], number: int) -> list[torch.Tensor]:
        whole = torch.stack([self._rules.biased(line, ids) for line, ids in zip(whole, seen, strict=True)])
        whole = self._penalized(whole, torch.arange(whole.shape[1]), seen)
        last = self._most is not None and number + 1 >= self._most
        return [self._rules(line, ids, Place(len(ids) - number, last)) for line, ids in zip(whole, seen, strict=True)]

    def _penalized(self, logits: torch.Tensor, of: torch.Tensor, seen: Sequence[Sequence[int]]) -> torch.Tensor:
        """`of`: the ids of the `logits`' columns."""
        if self.sampling.penalty == 1:
            return logits
        marks = torch.stack([torch.isin(of, torch.tensor(list(row))) for row in seen])
        return penalize(logits, marks, self.sampling.penalty)
