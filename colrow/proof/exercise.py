"""What the whole model and the split one are both asked, and their answers: one code for the two, so that nothing but the split differs.

Logits of a batch, loss and every gradient, cached decoding, one SGD and one AdamW step. The model is used as anyone would use a
transformers model: nothing here knows how it was split.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

IGNORED = -100  # the label that transformers' loss leaves out


@dataclass(frozen=True)
class Questions:
    """`ids` and `labels` (B, S) for logits, loss and gradients; `prompt` (1, P) for cached decoding of `steps` tokens (0: no decoding)."""

    ids: torch.Tensor
    labels: torch.Tensor
    prompt: torch.Tensor
    steps: int
    train: bool = True

    def to(self, device: torch.device) -> Questions:
        return Questions(self.ids.to(device), self.labels.to(device), self.prompt.to(device), self.steps, self.train)

    def briefly(self) -> Questions:
        """Without training, and just enough decoding to use the cache."""
        return replace(self, train=False, steps=min(self.steps, 3))

    def without_training(self) -> Questions:
        return replace(self, train=False)

    def without_decoding(self) -> Questions:
        return replace(self, steps=0)


@dataclass(frozen=True)
class Answers:
    """`logits` (B, S, V); `loss` a scalar; `decoded` (steps, V): the logits before each token of `tokens`."""

    logits: torch.Tensor
    loss: torch.Tensor | None
    decoded: torch.Tensor
    tokens: tuple[int, ...]


def questions(
    vocabulary: int, batch: int = 2, length: int = 13, prompt: int = 7, steps: int = 6, seed: int = 1, train: bool = True
) -> Questions:
    """Random ids that include the first and the last of the vocabulary (both ends of a cut), and some labels that do not count."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=draw)
    ids[0, 0], ids[0, 1] = 0, vocabulary - 1
    labels = ids.clone()
    labels[-1, : length // 3] = IGNORED
    return Questions(ids, labels, torch.randint(0, vocabulary, (1, prompt), generator=draw), steps, train)


def ask(
    model: nn.Module,
    asked: Questions,
    follow: tuple[int, ...] | None = None,
    phase: Callable[[str], None] = lambda name: None,
    slices: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Answers:
    """Runs the model; gradients are left in `.grad`. `follow` are the tokens to decode along (the whole model's), so that logits stay
    comparable after two models have chosen differently; by default the model's own. `phase` is told what begins; `slices` is entered for
    the loss."""
    asked = asked.to(next(model.parameters()).device)
    phase("prefill")
    with torch.no_grad():
        logits = model(input_ids=asked.ids, attention_mask=torch.ones_like(asked.ids), use_cache=False).logits
    loss = None
    if asked.train:
        model.zero_grad(set_to_none=True)
        phase("train_forward")
        with slices():
            mask = torch.ones_like(asked.ids)
            loss = model(input_ids=asked.ids, attention_mask=mask, labels=asked.labels, use_cache=False).loss
        phase("train_backward")
        loss.backward()
        loss = loss.detach()
    decoded, tokens = _decode(model, asked, follow, phase)
    phase("")
    return Answers(logits, loss, decoded, tokens)


def _decode(
    model: nn.Module, asked: Questions, follow: tuple[int, ...] | None, phase: Callable[[str], None]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Greedy decoding with the cache. Ties go to the lowest id, as argmax does."""
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    name = cache_name(model)
    given: dict[str, Any] = {}
    ids = asked.prompt
    with torch.no_grad():
        for step in range(asked.steps):
            phase("decode_prompt" if step == 0 else "decode")
            mask = asked.prompt.new_ones(1, asked.prompt.shape[1] + step)
            out = model(input_ids=ids, attention_mask=mask, use_cache=True, **given)
            rows.append(out.logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
            if out.get(name) is None:
                break  # an encoder: it has no cache, and nothing to decode
            given = {name: out[name]}
            ids = asked.prompt.new_tensor([[tokens[-1] if follow is None else follow[step]]])
    return torch.stack(rows) if rows else asked.prompt.new_empty(0, 0).float(), tuple(tokens)


def cache_name(model: nn.Module) -> str:
    """How this model calls its cache: transformers before 5.24 `past_key_values`, from then on `cache`; state space models have other
    names."""
    known = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values", "cache_params"):
        if name in known:
            return name
    raise TypeError(f"{type(model).__name__}.forward takes no cache")


@dataclass(frozen=True)
class StepSizes:
    """Chosen from the whole model's numbers, used for both models."""

    sgd: float
    adamw: float
    eps: float


def step_sizes(model: nn.Module) -> StepSizes:
    """Steps that move a parameter by about a tenth of its size, so that a missing step stands far above rounding. AdamW's eps is the size
    of a gradient: with the usual 1e-8 its first step is lr * sign(gradient), which turns the rounding of a zero into a full step."""
    pairs = [(p.detach(), p.grad) for p in model.parameters() if p.grad is not None]
    count = sum(p.numel() for p, _ in pairs)
    size = math.hypot(*(float(torch.linalg.vector_norm(p.float())) for p, _ in pairs)) / math.sqrt(count)
    slope = math.hypot(*(float(torch.linalg.vector_norm(g.float())) for _, g in pairs)) / math.sqrt(count)
    return StepSizes(sgd=0.1 * size / slope, adamw=0.1 * size, eps=slope)


Reach = Callable[[float], float]
"""By how much a step moves an element whose gradient is that large."""


def optimizers(parameter: nn.Parameter, sizes: StepSizes) -> Iterator[tuple[str, torch.optim.Optimizer, float, Reach]]:
    """SGD, then AdamW: name, optimizer, how much faster than the gradient the step can change, and the step's reach."""
    yield "SGD", torch.optim.SGD([parameter], lr=sizes.sgd), sizes.sgd, lambda g: sizes.sgd * g
    adamw = torch.optim.AdamW([parameter], lr=sizes.adamw, eps=sizes.eps, weight_decay=0.1)
    yield "AdamW", adamw, sizes.adamw / sizes.eps, lambda g: sizes.adamw * g / (g + sizes.eps)
