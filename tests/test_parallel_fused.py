"""Head and loss in one, beside the head's product and torch's loss; and whole models' `.loss` without logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients
from colrow.parallel.fused import forward_loss, linear_cross_entropy
from colrow.parallel.head import sharded_logits
from colrow.partition import even
from colrow.planning.derive import derive
from colrow.proof.precision import Float64

from . import tiny
from .families import FAMILIES

IGNORE, WIDTH = -100, 12


def example(words: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(words)
    hidden, weight, bias = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((4, 7, WIDTH), (words, WIDTH), (words,)))
    labels = torch.randint(0, words, (4, 7), generator=draw)
    labels[0, :3], labels[1, 0], labels[1, 1], labels[3] = IGNORE, 0, words - 1, IGNORE
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), labels


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "weights": {"class_weight": torch.linspace(0.1, 2, 101, dtype=torch.float64), "label_smoothing": 0.2},
    "weights, none": {"class_weight": torch.linspace(0.1, 2, 101, dtype=torch.float64), "reduction": "none"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("ranks", "chunk"), [(1, 5), (2, 1), (3, 5), (3, 28), (2, None)])
def test_equal_to_torch(options: str, ranks: int, chunk: int | None) -> None:
    """Chunks that do not divide the tokens, one of them all ignored."""
    *tensors, labels = example(101)
    tensors = [t.clone().requires_grad_() for t in tensors]
    given = dict(OPTIONS[options])
    theirs = {("weight" if key == "class_weight" else key): value for key, value in given.items()}
    scale = torch.rand(labels.shape, dtype=torch.float64) if given.get("reduction") == "none" else 0.7
    expected = F.cross_entropy(F.linear(*tensors).flatten(0, 1), labels.flatten(), **theirs)
    expected = expected.view_as(labels) if expected.dim() else expected
    (expected * scale).sum().backward()
    partition = even(0, 101, ranks)

    def rank(group: Group) -> tuple[torch.Tensor, ...]:
        hidden, weight, bias = (t.detach().clone() for t in tensors)
        mine = [hidden, partition.split(weight, group.rank).clone(), partition.split(bias, group.rank).clone()]
        mine = [t.requires_grad_() for t in mine]
        loss = linear_cross_entropy(*mine, labels, group, partition, chunk=chunk, **given)
        (loss * scale).sum().backward()
        return loss.detach(), *[t.grad for t in mine]

    results = run_threads(rank, ranks)
    for loss, *_ in results:
        assert (loss - expected).abs().max() <= 1e-12
    found = [sum(r[1] for r in results), torch.cat([r[2] for r in results]), torch.cat([r[3] for r in results])]
    for a, b in zip(tensors, found, strict=True):
        assert (a.grad - b).abs().max() <= 1e-12


def test_sixteen_bits_add_up_in_float32() -> None:
    """300 chunks of one token each: a sum in bfloat16 would stand still long before."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, WIDTH, generator=draw).bfloat16()
    weight = (0.1 * torch.randn(9, WIDTH, generator=draw)).bfloat16().requires_grad_()
    labels = torch.randint(0, 9, (300,), generator=draw)

    def rank(group: Group) -> torch.Tensor:
        mine = weight.detach().clone().requires_grad_()
        linear_cross_entropy(hidden, mine, None, labels, group, even(0, 9, 1), chunk=1, reduction="sum").backward()
        return mine.grad

    F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum").backward()
    (found,) = run_threads(rank, 1)
    torch.testing.assert_close(found, weight.grad, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("labels_of", ["all ignored", "no tokens"])
def test_nothing_to_learn_from(labels_of: str) -> None:
    hidden, weight, _, labels = example(11)
    if labels_of == "no tokens":
        hidden, labels = hidden[:0], labels[:0]
    labels = torch.full_like(labels, IGNORE)

    def rank(group: Group) -> None:
        mine = [t.clone().requires_grad_() for t in (hidden, even(0, 11, 2).split(weight, group.rank))]
        loss = linear_cross_entropy(*mine, None, labels, group, even(0, 11, 2))
        loss.backward()
        assert loss == 0
        assert not any(t.grad.any() for t in mine)
        with pytest.raises(RuntimeError, match="second time|earlier backward"):
            loss.backward()

    run_threads(rank, 2)


def test_another_width_is_refused() -> None:
    hidden, weight, _, labels = example(11)

    def rank(group: Group) -> None:
        with pytest.raises(UserError, match="11 columns on rank"):
            linear_cross_entropy(hidden, weight, None, labels, group, even(0, 11, 2))

    run_threads(rank, 2)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an op has made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= x.numel() * x.element_size():
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_all_tokens_never_exist(reduction: Any) -> None:
    tokens, words, chunk = 512, 400, 32
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, WIDTH, generator=draw), torch.randn(words, WIDTH, generator=draw)
    labels = torch.randint(0, words, (tokens,), generator=draw)
    (mine,) = run_threads(lambda group: _largest(group, hidden, weight, labels, chunk, reduction), 1)
    assert mine == chunk * words
    with Largest() as seen:
        F.cross_entropy(F.linear(hidden, weight), labels)
    assert seen.elements == tokens * words, "the measurement sees them where they exist"


def _largest(group: Group, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int, reduction: Any) -> int:
    mine = [t.clone().requires_grad_() for t in (hidden, weight)]
    with Largest() as seen:
        linear_cross_entropy(*mine, None, labels, group, even(0, len(weight), 1), chunk=chunk, reduction=reduction).sum().backward()
    return seen.elements


PLAIN = ("llama", "llama-tied", "gpt2", "phi", "mistral", "bert")  # phi's head has a bias; BERT's model computes its loss on the spot
OTHERS = ("gemma2", "granite", "cohere")  # soft-capped or scaled between head and loss


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", [*PLAIN, *OTHERS])
def test_the_models_own_loss(family: str, ranks: int) -> None:
    """... and every gradient, where the model allows it and where it does not."""
    cfg = FAMILIES[family]() if family in FAMILIES else tiny.config(family)
    plan, whole, ids = derive(cfg, ranks), tiny.whole(cfg), tiny.ids(cfg)
    labels = ids.clone()
    labels[0, 3:6] = IGNORE
    copies = [copy.deepcopy(whole) for _ in range(ranks)]
    with Float64():
        expected = whole(input_ids=ids, labels=labels).loss
        expected.backward()

    def rank(group: Group) -> tuple[torch.Tensor, dict[str, torch.Tensor], bool]:
        model = parallelize(copies[group.rank], plan, group)
        with Float64():
            first = forward_loss(model, input_ids=ids, labels=labels)
            loss = forward_loss(model, input_ids=ids, labels=labels)
            loss.backward()
            assert torch.equal(first, loss)
            with sharded_logits(model), torch.no_grad():
                assert model(ids).logits.isfinite().all(), "the head is as it was"
        return loss.detach(), whole_gradients(model), model.colrow.plain

    for loss, gradients, plain in run_threads(rank, ranks):
        assert (loss - expected).abs() <= 1e-10
        assert plain == (family not in OTHERS)
        for name, p in whole.named_parameters():
            assert (gradients[name] - p.grad).abs().max() <= 1e-10, name
