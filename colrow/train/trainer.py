"""The loop of `colrow train`: rows in, steps, evaluations and checkpoints out. Every rank runs it; nothing of it is hidden in the parts.

    trainer = Trainer(model, rows, settings, out=Path("run"))
    for event in trainer.run(): print(event)

The model is any split model (one rank included); parameters in 16 bits get float32 masters. Steps are numbered from 1. A run that is
stopped and started again with the same settings goes on from the last whole checkpoint in `out`, at any number of ranks. Not here: reading
data, printing, where the model comes from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..checkpoint.rank_files import complete, directory_name, open_checkpoint
from ..errors import ColrowError, UserError
from ..parallel import random
from ..parallel.head import loss_terms
from ..parallel.recompute import recompute_layers
from ..parallel.state import state_of
from . import checkpoint
from .data import Row, batch, window
from .gradients import grad_norm, scale_to
from .master import MasterWeights
from .nonfinite import first_not_finite
from .replicas import Replicas
from .settings import Settings
from .step import IGNORED, Batch, backward, check_same_data, mean_loss

OTHER_SEED = 1_000_003  # what a replica's number is multiplied by: replicas drop other places


@dataclass(frozen=True)
class Step:
    """`loss`: mean over the step's tokens, smoothing and z-loss included; `norm`: of the gradient before clipping; `tokens` that were read,
    in so many `seconds`. All of it of all replicas."""

    step: int
    steps: int
    loss: float
    norm: float
    rate: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    step: int
    loss: float


@dataclass(frozen=True)
class SavedAt:
    step: int
    path: Path


@dataclass(frozen=True)
class Resumed:
    step: int
    path: Path


Event = Step | Evaluation | SavedAt | Resumed


class NotFinite(ColrowError):
    """The loss or the gradient is inf or nan."""


class Trainer:
    """Holds what changes from step to step: the model, the optimizer and the number of the step."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Row],
        settings: Settings,
        out: Path | None = None,
        evaluation: Sequence[Row] = (),
        padding: int = 0,
        beside: Callable[[Path], None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """`beside(path)` writes what a checkpoint should hold besides (the tokenizer), on rank 0. Without `out` nothing is saved.
        `replicas`: those of this model, which share each step's rows; a step is the same step at any number of them."""
        if not rows:
            raise UserError("there are no rows to train on", 0)
        self.model, self.rows, self.settings, self.evaluation = model, rows, settings, evaluation
        self.out, self.padding, self.beside = out, padding, beside
        self.group = state_of(model).group
        self.replicas = replicas or Replicas.single(self.group)
        self.master = MasterWeights(model)
        self.optimizer = adamw(self.master.parameters, settings)
        self.step, self.tokens = 0, 0
        per_epoch = -(-len(rows) // (settings.batch * settings.accumulate))
        self.total = settings.steps if settings.steps is not None else settings.epochs * per_epoch
        if settings.recompute:
            recompute_layers(model)
        with loss_terms(model, settings.smoothing, settings.z_loss):  # UserError before the first step
            unused = self.replicas.size > 1 and self._leaves_unused()
        self.called = self.replicas.wrap(model, self.master, find_unused_parameters=unused)

    def run(self) -> Iterator[Event]:
        """Trains to the end. NotFinite, naming step and module, where the loss or the gradient is not finite; nothing is changed then."""
        yield from self._resume()
        saved = evaluated = self.step
        while self.step < self.total:
            yield self.one_step()
            if self.evaluation and self._due(self.settings.evaluate_every):
                yield self.evaluate()
                evaluated = self.step
            if self.out is not None and self._due(self.settings.save_every):
                yield self.save()
                saved = self.step
        if self.evaluation and evaluated != self.step:
            yield self.evaluate()
        if self.out is not None and saved != self.step:
            yield self.save()

    def one_step(self) -> Step:
        """One step of the optimizer. A collective of all ranks."""
        settings, start = self.settings, time.perf_counter()
        self.model.train()
        batches = self._batches(window(self.rows, self.step, settings.batch * settings.accumulate, settings.seed))
        check_same_data(batches, self.group)
        replicas, total = self.replicas, self.replicas.total(batches)
        random.seed_dropout(self.model, settings.seed + replicas.index * OTHER_SEED, self.step * settings.accumulate)
        with loss_terms(self.model, settings.smoothing, settings.z_loss):
            loss = replicas.sum(backward(self.called, batches, replicas=replicas.size, total=total))
        norm = grad_norm(self.master.parameters, state_of(self.model).plan, self.group)
        if not (math.isfinite(loss) and bool(norm.isfinite())):
            self.optimizer.zero_grad()
            where = first_not_finite(self.model, batches, replicas.world)
            raise NotFinite(f"step {self.step + 1}: the loss is {loss:g}, the gradient's norm {float(norm):g}; {where}")
        if settings.clip:
            scale_to(self.master.parameters, norm, settings.clip)
        rate = settings.rate(self.step, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.master.write_back()
        self.optimizer.zero_grad()
        read = int(replicas.sum(sum(b["input_ids"].numel() for b in batches)))
        self.step, self.tokens = self.step + 1, self.tokens + read
        return Step(self.step, self.total, loss, float(norm), rate, read, time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Mean cross entropy over the tokens of the evaluation rows: without dropout, smoothing and z-loss."""
        self.model.eval()
        batches = self._batches(self.evaluation)
        tokens = max(1, self.replicas.total(batches))
        return Evaluation(self.step, self.replicas.sum(sum(float(mean_loss(self.model, b, tokens)) for b in batches)))

    def save(self) -> SavedAt:
        """A checkpoint of this step in `out`/checkpoints, written by the first replica."""
        assert self.out is not None
        extra = {"tokens": self.tokens, "rows": len(self.rows), "seed": self.settings.seed}
        where = self.out / "checkpoints"
        what = self.step, self.model, self.master.parameters, self.optimizer, extra
        self.replicas.once(lambda: checkpoint.save(where, *what, beside=self.beside, keep=self.settings.keep), "checkpoint.replicas")
        return SavedAt(self.step, where / directory_name(self.step))

    def _resume(self) -> Iterator[Event]:
        if self.out is None or not complete(self.out / "checkpoints"):
            return
        saved = open_checkpoint(self.out)
        extra = checkpoint.resume(saved, self.model, self.master.parameters, self.optimizer)
        if (extra["rows"], extra["seed"]) != (len(self.rows), self.settings.seed):
            found = f"{len(self.rows)} rows and seed {self.settings.seed}"
            raise UserError(
                f"{saved.path} was trained on {extra['rows']} rows and seed {extra['seed']}", found, "the same, or another --out"
            )
        self.step, self.tokens = saved.step, extra["tokens"]
        saved.close()
        yield Resumed(self.step, saved.path)

    def _batches(self, rows: Sequence[Row]) -> list[Batch]:
        """The micro-batches of this replica's share of `rows`. Without a share it runs along with a row from which nothing is learned."""
        size, mine = self.settings.batch, self.replicas.rows(rows) or [replace(rows[0], labels=(IGNORED,) * len(rows[0].labels))]
        packed, device = self.settings.packed, self.group.device
        return [batch(mine[at : at + size], self.padding, packed, device) for at in range(0, len(mine), size)]

    def _leaves_unused(self) -> bool:
        """Whether a step may leave parameters without a gradient, which DDP would wait for: one row is tried."""
        backward(self.model.train(), [batch(self.rows[:1], self.padding, self.settings.packed, self.group.device)])
        unused = any(p.grad is None for p in self.master.parameters.values())
        self.optimizer.zero_grad()
        return unused

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0


def adamw(parameters: dict[str, nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    """AdamW of torch. Matrices decay towards 0; biases and norms do not."""
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas)


@torch.no_grad()
def keeps_documents_apart(model: nn.Module, vocabulary: int) -> bool:
    """Whether the model's attention honours packed rows: two short documents in one row give the logits that each gives alone."""
    model.eval()
    device = state_of(model).group.device
    first, second = (torch.arange(start, start + size, device=device)[None] % vocabulary for start, size in ((3, 5), (11, 4)))
    row = torch.cat([first, second], 1)
    positions = torch.tensor([[*range(5), *range(4)]], device=device)
    together = model(input_ids=row, position_ids=positions, use_cache=False).logits[:, 5:]
    alone = model(input_ids=second, use_cache=False).logits
    return bool((together - alone).abs().max() <= 1e-2 * alone.abs().max())
