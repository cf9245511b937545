"""The whole model's answers, with what is needed to judge others by them: scales, and its own distance from the exact result.

The whole model runs once, in one process, before any rank starts; the ranks then compare their own slices with it. Large answers (gradients,
updates) go where the caller says: into a dict, or into files that the ranks map. Not here: the split model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..planning.plan import Plan
from .compare import difference
from .exercise import Answers, Questions, StepSizes, ask, step_sizes, steps
from .precision import Float64

Tensors = Mapping[str, torch.Tensor]
SMALL_GRADIENT = 1e-3
"""Gradients are measured against at least this share of the largest gradient of the model: some are exactly zero but for rounding (of a bias
that a softmax cancels), and nothing can be said relative to nothing."""


@dataclass(frozen=True)
class Reference:
    """`tensors["gradients"][name]`, and "SGD" and "AdamW": by how much the step changed the parameter. `scales[kind][name]` is a tensor's largest
    absolute element (or what counts as such), `own_errors` the whole model's own relative error against float64, empty where not measured.
    `weights[name][rank]` is the digest of the rank's slice of the parameter before any step."""

    dtype: torch.dtype
    asked: Questions
    answers: Answers
    steps: StepSizes | None
    weights: dict[str, tuple[str, ...]]
    scales: dict[str, dict[str, float]]
    own_errors: dict[str, dict[str, float]]
    tensors: dict[str, Tensors] = field(default_factory=dict)

    def own_error(self, kind: str, name: str) -> float | None:
        return self.own_errors.get(kind, {}).get(name)


Keep = Callable[[str, dict[str, torch.Tensor]], Tensors]
"""Takes the tensors of one kind and returns a mapping that has them from then on."""


def in_memory(kind: str, tensors: dict[str, torch.Tensor]) -> Tensors:
    return {name: t.detach().clone() for name, t in tensors.items()}


class InFiles:
    """Keeps tensors in one safetensors file a kind; ranks open them again by the folder (`FileTensors`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, kind: str, tensors: dict[str, torch.Tensor]) -> Tensors:
        file = self.folder / f"{kind}.safetensors"
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, file)
        return FileTensors(file)


class FileTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, mapped: only what is looked at is read. Can be pickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as opened:
            if name not in opened.keys():  # noqa: SIM118  (not a dict)
                raise KeyError(name)
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        with safe_open(self.file, framework="pt") as opened:
            return iter(list(opened.keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass
class Exact:
    """What a float64 run said."""

    answers: Answers
    gradients: dict[str, torch.Tensor]


def exact(model: PreTrainedModel, asked: Questions, tokens: tuple[int, ...] | None = None) -> Exact:
    """Runs a float64 model, with everything inside in float64. Its gradients are taken away from it."""
    with Float64():
        answers = ask(model, asked, follow=tokens)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Exact(answers, gradients)


def reference(model: PreTrainedModel, plan: Plan, asked: Questions, keep: Keep = in_memory, truth: Callable[[tuple[int, ...]], Exact] | None = None) -> Reference:
    """Asks the whole model; changes its parameters where `asked.train`. In float64 everything inside runs in float64.

    `truth` gives the float64 answers along the tokens that this model chose; without it nothing is said about the model's own error.
    """
    dtype = next(model.parameters()).dtype
    names = [name for name, _ in model.named_parameters()]
    weights = {name: _digests(p, plan, name) for name, p in model.named_parameters()}
    with Float64() if dtype is torch.float64 else nullcontext():
        answers = ask(model, asked)
    out = Reference(dtype, asked, answers, step_sizes(model) if asked.train else None, weights, {}, {})
    perfect = truth(answers.tokens) if truth else None
    if perfect:
        _own(out, "logits", "logits", perfect.answers.logits, answers.logits)
        if answers.tokens:
            _own(out, "decoding", "logits", perfect.answers.decoded, answers.decoded)
    if not asked.train or out.steps is None:
        return out
    assert answers.loss is not None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, g in gradients.items():
        _scale(out, "gradients", name, max(float(g.abs().max()), SMALL_GRADIENT * largest))
    if perfect and perfect.answers.loss is not None:
        _own(out, "loss", "loss", perfect.answers.loss, answers.loss)
        for name, g in gradients.items():
            _own(out, "gradients", name, perfect.gradients.pop(name), g)
    out.tensors["gradients"] = keep("gradients", gradients)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for kind in steps(model, out.steps):
        change = {name: model.get_parameter(name).detach() - before[name] for name in names}
        for name in gradients:
            _scale(out, kind, name, float(change[name].abs().max()))
            _step_error(out, kind, name, float(before[name].abs().max()))
        out.tensors[kind] = keep(kind, change)
        for name in names:
            before[name].copy_(model.get_parameter(name).detach())
    return out


def _scale(out: Reference, kind: str, name: str, value: float) -> None:
    out.scales.setdefault(kind, {})[name] = value or 1.0


def _own(out: Reference, kind: str, name: str, truth: torch.Tensor, mine: torch.Tensor) -> None:
    out.own_errors.setdefault(kind, {})[name] = difference(truth, mine, out.scales.get(kind, {}).get(name))[0]


def _step_error(out: Reference, kind: str, name: str, size: float) -> None:
    """The relative error of a parameter's change: the gradient's, through the optimizer, and the rounding of the parameter itself."""
    error = out.own_error("gradients", name)
    if error is None or out.steps is None:
        return
    gain = out.steps.sgd if kind == "SGD" else out.steps.adamw / out.steps.eps
    absolute = gain * error * out.scales["gradients"][name] + torch.finfo(out.dtype).eps * size
    out.own_errors.setdefault(kind, {})[name] = absolute / out.scales[kind][name]


def _digests(parameter: torch.Tensor, plan: Plan, name: str) -> tuple[str, ...]:
    partition = plan.tensor(name).partition
    if partition.is_whole:
        return (digest(parameter),) * plan.ranks
    return tuple(digest(partition.split(parameter.detach(), rank)) for rank in range(plan.ranks))


def digest(tensor: torch.Tensor) -> str:
    """Of the exact bits and the shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return hashlib.blake2b(data, digest_size=16, person=b"colrow", salt=json.dumps(list(tensor.shape)).encode()[:16]).hexdigest()
