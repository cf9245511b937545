"""The parallel cross entropy beside torch's on the whole logits, and the model's `.loss` beside transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.head import parallel_loss
from colrow.parallel.loss import parallel_cross_entropy, parallel_logprobs
from colrow.partition import Partition, even

IGNORE = -100


def example(words: int, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(words)
    logits = (scale * torch.randn(4, 6, words, generator=draw, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, words, (4, 6), generator=draw)
    labels[0, :3], labels[1, 0], labels[1, 1] = IGNORE, 0, words - 1
    return logits, labels


def whole_loss(logits: torch.Tensor, labels: torch.Tensor, weight: Any, /, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.clone().requires_grad_()
    loss = F.cross_entropy(x.flatten(0, 1), labels.flatten(), **options)
    loss = loss.view_as(labels) if loss.dim() else loss
    (loss * weight).sum().backward()
    return loss.detach(), x.grad


def split_loss(
    logits: torch.Tensor, labels: torch.Tensor, weight: Any, partition: Partition, /, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and the gradient put together; every rank must say the same, change nothing, and stay within three all-reduces."""
    columns = Partition(2, partition.pieces)

    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        x = columns.split(logits, group.rank).clone().requires_grad_()
        before = x.detach().clone()
        loss = parallel_cross_entropy(x, labels, group, partition, **options)
        calls = group.counters.total().calls
        (loss * weight).sum().backward()
        assert torch.equal(x.nan_to_num(), before.nan_to_num())
        assert calls <= 3
        assert group.counters.total().calls == calls, "nothing is communicated backward"
        return loss.detach(), x.grad

    results = run_threads(rank, partition.ranks)
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
    return results[0][0], columns.merge([grad for _, grad in results])


CUTS = {
    "even": lambda words, ranks: even(0, words, ranks),
    "weights": lambda words, ranks: even(0, words, ranks, [0.0, 3.0, *[1.0] * (ranks - 2)]),
    "scattered": lambda words, ranks: Partition(0, tuple(tuple((i, i + 1) for i in range(r, words, ranks)) for r in range(ranks))),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("words", "ranks"), [(101, 2), (101, 3), (5, 4), (3, 5)])
def test_equal_to_torch(words: int, ranks: int, cut: str, smoothing: float, reduction: str) -> None:
    logits, labels = example(words)
    weight = torch.rand(labels.shape, dtype=torch.float64) if reduction == "none" else 0.7
    options = {"label_smoothing": smoothing, "reduction": reduction}
    expected = whole_loss(logits, labels, weight, **options)
    found = split_loss(logits, labels, weight, CUTS[cut](words, ranks), **options)
    for a, b in zip(expected, found, strict=True):
        assert (a - b).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sixteen_bits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = example(101, dtype)
    expected, grad = whole_loss(logits.float(), labels, 1.0)
    found, found_grad = split_loss(logits, labels, 1.0, even(0, 101, 3))
    assert found.dtype is torch.float32
    assert found_grad.dtype is dtype
    assert (found - expected).abs() <= 1e-6
    torch.testing.assert_close(found_grad.float(), grad, rtol=float(torch.finfo(dtype).eps), atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("words", "ranks", "cut"), [(101, 3, "scattered"), (101, 2, "weights"), (3, 5, "even")])
def test_class_weights(words: int, ranks: int, cut: str, smoothing: float, reduction: str) -> None:
    logits, labels = example(words)
    weight = torch.rand(labels.shape, dtype=torch.float64) if reduction == "none" else 0.7
    classes = torch.rand(words, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    classes[0] = 0
    options = {"label_smoothing": smoothing, "reduction": reduction, "weight": classes}
    expected = whole_loss(logits, labels, weight, **options)
    found = split_loss(logits, labels, weight, CUTS[cut](words, ranks), **options)
    for a, b in zip(expected, found, strict=True):
        assert (a - b).abs().max() <= 1e-12


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"weight": torch.linspace(0.1, 2, 101, dtype=torch.float64)}],
    ids=["plain", "smoothing", "weights"],
)
def test_z_loss(options: dict[str, Any], reduction: str) -> None:
    """Of the whole row's log Σ exp x, not of one shifted by a maximum (nanotron); every row that counts, alike."""
    logits, labels = example(101)
    counts = labels != IGNORE
    x = logits.clone().requires_grad_()
    entropy = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction=reduction, **options)
    z = 0.3 * x.logsumexp(-1).square() * counts
    expected = (entropy.view(4, 6) + z) if reduction == "none" else entropy + (z.sum() / (counts.sum() if reduction == "mean" else 1))
    weight = torch.rand(labels.shape, dtype=torch.float64) if reduction == "none" else 0.7
    (expected * weight).sum().backward()
    found, grad = split_loss(logits, labels, weight, even(0, 101, 3), z_loss=0.3, reduction=reduction, **options)
    assert (found - expected).abs().max() <= 1e-11
    assert (grad - x.grad).abs().max() <= 1e-12


def test_class_weights_of_another_length_are_refused() -> None:
    logits, labels = example(8)
    with pytest.raises(UserError, match="class weights"):
        parallel_cross_entropy(logits, labels, single(), even(0, 8, 1), weight=torch.ones(4))


def test_log_probabilities_of_tokens() -> None:
    logits, labels = example(101)
    chosen = labels.clamp(min=0)
    x = logits.clone().requires_grad_()
    expected = x.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1).masked_fill(labels == IGNORE, 0)
    expected.square().sum().backward()
    partition = even(0, 101, 3)

    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        mine = Partition(2, partition.pieces).split(logits, group.rank).clone().requires_grad_()
        found = parallel_logprobs(mine, labels, group, partition)
        found.square().sum().backward()
        return found.detach(), mine.grad

    results = run_threads(rank, 3)
    for found, _ in results:
        assert (found - expected).abs().max() <= 1e-12
    assert (torch.cat([grad for _, grad in results], 2) - x.grad).abs().max() <= 1e-12


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize(("words", "ranks"), [(8, 2), (8, 3), (101, 2), (101, 3)])
def test_o28_smoothing_looks_at_the_whole_vocabulary(words: int, ranks: int, scale: float) -> None:
    """NVIDIA/Megatron-LM #7464: coefficient and mean were the shard's; #737: logarithms of 0 where logits are large."""
    logits, labels = example(words, torch.float32, scale)
    expected, grad = whole_loss(logits, labels, 1.0, label_smoothing=0.1)
    found, found_grad = split_loss(logits, labels, 1.0, even(0, words, ranks), label_smoothing=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_grad, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_o29_few_labels_count(ranks: int) -> None:
    """pytorch/pytorch #116349 and its kind: -100 less the shard's start is also an index; the mean is over labels that count."""
    logits, labels = example(9)
    labels[:] = IGNORE
    labels[3, 5] = 8  # the last id, on the last rank
    for more in (None, (0, 2)):
        if more:
            labels[more] = 0
        expected = whole_loss(logits, labels, 1.0)
        found = split_loss(logits, labels, 1.0, even(0, 9, ranks))
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand(dtype: torch.dtype) -> None:
    """Without the maximum exp overflows; with maximum and logarithm in one float32 number the softmax would be off by 1e-3."""
    logits, labels = example(11, dtype, scale=1.0)
    logits[:, ::2] += 1e4
    logits[:, 1::2] -= 1e4
    logits[2, 2] = torch.linspace(-1e4, 1e4, 11, dtype=dtype)
    expected, grad = whole_loss(logits, labels, 1.0)
    found, found_grad = split_loss(logits, labels, 1.0, even(0, 11, 3))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_grad, grad)


def test_columns_that_are_ruled_out() -> None:
    """-inf is what a mask on tokens writes. On one rank every column may be ruled out."""
    logits, labels = example(9)
    labels = labels.clamp(max=3).where(labels != IGNORE, labels)
    logits[..., 6:] = float("-inf")
    expected = whole_loss(logits, labels, 1.0)
    found = split_loss(logits, labels, 1.0, even(0, 9, 3))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


def test_columns_on_two_ranks_are_refused() -> None:
    logits, labels = example(8)
    with pytest.raises(UserError, match="counted twice"):
        parallel_cross_entropy(logits[..., :5], labels, single(), Partition(0, (((0, 5),), ((3, 8),))))


def test_o29_every_label_ignored_is_zero_with_zero_gradients() -> None:
    logits, labels = example(7)
    labels[:] = IGNORE
    assert whole_loss(logits, labels, 1.0)[0].isnan(), "torch says nan"
    loss, grad = split_loss(logits, labels, 1.0, even(0, 7, 2))
    assert loss == 0
    assert not grad.any()


def test_an_ignored_row_may_hold_anything() -> None:
    logits, labels = example(7)
    logits[0, 0] = float("nan")
    _, grad = split_loss(logits, labels, 1.0, even(0, 7, 2))
    assert not grad.isnan().any()


def test_whole_logits_are_refused() -> None:
    """Otherwise the loss would be too large by log R, and train."""
    logits, labels = example(8)

    def rank(group: Group) -> None:
        with pytest.raises(UserError, match="8 columns on rank"):
            parallel_cross_entropy(logits, labels, group, even(0, 8, 2))

    run_threads(rank, 2)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_a_label_that_does_not_exist_is_an_error(wrong: int) -> None:
    logits, labels = example(8)
    labels[3, 3] = wrong
    with pytest.raises(IndexError, match=f"label {wrong} "):
        parallel_cross_entropy(logits, labels, single(), even(0, 8, 1))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "items as a number": {"num_items_in_batch": 13},
    "items as a tensor": {"num_items_in_batch": torch.tensor(13)},
    "another ignore_index": {"ignore_index": 2},
    "shifted already": {"shift_labels": example(101)[1].roll(1, 1)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("original", [ForCausalLMLoss, ForMaskedLMLoss])
def test_equal_to_the_loss_of_transformers(original: Any, options: str) -> None:
    logits, labels = example(101, torch.float32)
    if options == "another ignore_index":
        labels = labels.clamp(min=0)
    x = logits.clone().requires_grad_()
    given = OPTIONS[options] if original is ForCausalLMLoss else {k: v for k, v in OPTIONS[options].items() if k != "shift_labels"}
    expected = original(x, labels, 101, **given)
    expected.backward()
    partition = even(0, 101, 2)

    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        mine = Partition(2, partition.pieces).split(logits, group.rank).clone().requires_grad_()
        loss = parallel_loss(original, group, partition)(logits=mine, labels=labels, vocab_size=101, **given)
        loss.backward()
        return loss.detach(), mine.grad

    results = run_threads(rank, 2)
    torch.testing.assert_close(results[0][0], expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in results], 2), x.grad)


def test_another_loss_is_refused() -> None:
    with pytest.raises(UserError, match="my_loss"):
        parallel_loss(my_loss, single(), even(0, 8, 1))(logits=torch.zeros(1, 8), labels=torch.zeros(1), vocab_size=8)


def my_loss(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(())
