"""The whole model's answers, with what is needed to judge others by them: scales, and its own distance from the exact result.

The whole model runs once, in one process, before any rank starts; the ranks then compare their own slices with it. Gradients go where the
caller says: into a dict, or into a file that the ranks map. Not here: the split model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..planning.plan import Plan
from .compare import MASKED, difference, largest, unfit
from .exercise import Answers, Questions, StepSizes, ask, step_sizes
from .precision import Float64, computing_in

Tensors = Mapping[str, torch.Tensor]
SMALL_GRADIENT = 1e-3
"""Gradients are measured against at least this share of the largest gradient of the model: some are exactly zero but for rounding (of a
bias that a softmax cancels), and nothing can be said relative to nothing."""


@dataclass
class Reference:
    """`weights[name][rank]` is the digest of the rank's slice of the parameter. `scales` are what gradients are measured against, by
    parameter. `own_errors[kind][name]`: the whole model's own relative error against float64, empty where not measured. `unfit`: which of
    the whole model's own answers is no number, in words; nothing can be proven beside it."""

    dtype: torch.dtype
    asked: Questions
    answers: Answers
    weights: dict[str, tuple[str, ...]]
    steps: StepSizes | None = None
    gradients: Tensors = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    own_errors: dict[str, dict[str, float]] = field(default_factory=dict)
    unfit: str = ""

    def own_error(self, kind: str, name: str) -> float | None:
        return self.own_errors.get(kind, {}).get(name)


Keep = Callable[[dict[str, torch.Tensor]], Tensors]
"""Takes tensors and returns a mapping that has them from then on."""


def in_memory(tensors: dict[str, torch.Tensor]) -> Tensors:
    return dict(tensors)


def in_file(file: Path) -> Keep:
    def keep(tensors: dict[str, torch.Tensor]) -> Tensors:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, file)
        return FileTensors(file)

    return keep


class FileTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, mapped: only what is looked at is read. Can be pickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as opened:
            if name not in set(opened.keys()):
                raise KeyError(name)
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        with safe_open(self.file, framework="pt") as opened:
            return iter(list(opened.keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Exact:
    """What a float64 run said."""

    answers: Answers
    gradients: dict[str, torch.Tensor]


def exact(model: PreTrainedModel, asked: Questions) -> Exact:
    """Asks a float64 model, with everything inside in float64, for logits, loss and gradients. Decoding errs as the logits do."""
    with Float64():
        answers = ask(model, asked.without_decoding())
    return Exact(answers, gradients_of(model))


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reference(
    model: PreTrainedModel, plan: Plan, asked: Questions, keep: Keep = in_memory, truth: Callable[[], Exact] | None = None
) -> Reference:
    """Asks the whole model. `truth` gives the float64 answers; without it nothing is said about the model's own error."""
    dtype = next(model.parameters()).dtype
    weights = {name: _digests(p, plan, name) for name, p in model.named_parameters()}
    with computing_in(dtype):
        answers = ask(model, asked)
    out = Reference(dtype, asked, answers, weights)
    gradients = gradients_of(model)
    out.unfit = next(_unfit(answers, gradients), "")
    if gradients:
        sizes = {name: largest(g) for name, g in gradients.items()}
        out.scales = {name: max(size, SMALL_GRADIENT * max(sizes.values())) or 1.0 for name, size in sizes.items()}
        out.steps = step_sizes(model)
    if truth and not out.unfit:
        _measure(out, truth(), gradients)
    out.gradients = keep(gradients)
    return out


def _unfit(answers: Answers, gradients: Tensors) -> Iterator[str]:
    """What is no number, the first of it first."""
    named = [("logits", name, x) for name, x in answers.outputs.items()]
    named += [("loss", "the loss", answers.loss)] if answers.loss is not None else []
    named += [("decoding", "cached decoding", answers.decoded)] if answers.tokens else []
    named += [("gradients", f"the gradient of {name}", g) for name, g in gradients.items()]
    for kind, name, x in named:
        if said := unfit(x, masked=kind in MASKED):
            yield f"{name}: {said}"


def _measure(out: Reference, perfect: Exact, gradients: dict[str, torch.Tensor]) -> None:
    """Fills in the whole model's own errors."""
    found = out.answers.outputs
    errors = {name: difference(exact, found[name])[0] for name, exact in perfect.answers.outputs.items()}
    out.own_errors = {"outputs": errors, "logits": errors, "decoding": errors}
    if perfect.answers.loss is not None and out.answers.loss is not None:
        out.own_errors["loss"] = {"loss": difference(perfect.answers.loss, out.answers.loss)[0]}
    out.own_errors["gradients"] = {name: difference(perfect.gradients[name], g, out.scales[name])[0] for name, g in gradients.items()}


def _digests(parameter: torch.Tensor, plan: Plan, name: str) -> tuple[str, ...]:
    partition = plan.tensor(name).partition
    if partition.is_whole:
        return (digest(parameter),) * plan.ranks
    return tuple(digest(partition.split(parameter.detach(), rank)) for rank in range(plan.ranks))


def digest(tensor: torch.Tensor) -> str:
    """Of the exact bits and the shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    state = hashlib.blake2b(repr(tuple(tensor.shape)).encode(), digest_size=16)
    if flat.numel():
        state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()
