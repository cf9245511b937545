"""f, g and the gather/scatter pairs: values and gradients against the whole computation and against a computation by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from colrow.comm import collectives, group, local, regions
from colrow.comm.group import Group

SIZES = {2: (3, 4), 3: (2, 0, 5), 4: (1, 1, 2, 3)}  # of an axis of 7


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.preserve_format).requires_grad_()


# ---- the pair of Megatron-LM: column-parallel, GELU, row-parallel ----


def feed_forward(g: Group, transposed: bool) -> None:
    """Y = gelu(X W1^T) W2^T with W1 (7, 5) cut along dim 0 and W2 (6, 7) along dim 1; X and dY contiguous or transposed in memory."""
    x, w1, w2, dy = randn(4, 5), randn(7, 5, seed=1), randn(6, 7, seed=2), randn(4, 6, seed=3)
    if transposed:
        x, dy = (t.t().contiguous().t() for t in (x, dy))
    wx, ww1, ww2 = leaf(x), leaf(w1), leaf(w2)
    whole = torch.nn.functional.gelu(wx @ ww1.t()) @ ww2.t()
    whole.backward(dy)

    sizes = SIZES[g.size]
    own = slice(sum(sizes[: g.rank]), sum(sizes[: g.rank + 1]))
    px, pw1, pw2 = leaf(x), leaf(w1[own]), leaf(w2[:, own])
    hidden = torch.nn.functional.gelu(regions.copy_to(px, g, "f") @ pw1.t())
    y = regions.reduce_from(hidden @ pw2.t(), g, "g")
    y.backward(dy)
    close(y.detach(), whole.detach())
    close(px.grad, wx.grad)  # the gradient of a whole tensor is whole
    close(pw1.grad, ww1.grad[own])
    close(pw2.grad, ww2.grad[:, own])
    assert {(op, name) for _, op, name in g.counters.sites} == {("all_reduce", "g"), ("all_reduce", "f.grad")}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_feed_forward(size: int, transposed: bool) -> None:
    local.run_threads(feed_forward, size, transposed)


@pytest.mark.parametrize("broken", ["copy_to", "reduce_from"])
def test_without_f_or_g_the_comparison_fails(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, broken, lambda x, group, name: x)
    with pytest.raises(AssertionError, match="not close"):
        local.run_threads(feed_forward, 2, False)


def test_without_the_all_reduce_of_f_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions._Copy, "backward", staticmethod(lambda ctx, grad: (grad, None, None)))
    with pytest.raises(AssertionError, match="not close"):
        local.run_threads(feed_forward, 2, False)


def test_gradients_by_hand() -> None:
    """loss = mean(Y), Y = (X W1^T) W2^T: dY = 1/9; dO = dY W2; dX = the sum over ranks of dO W1; dW1 = dO^T X; dW2 = dY^T O."""

    def work(g: Group) -> None:
        x = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.float64, requires_grad=True)
        w1 = torch.tensor([[1.0, 0, -1], [2, 1, 0]], dtype=torch.float64)[g.rank : g.rank + 1].requires_grad_()
        w2 = torch.tensor([[1.0, 2], [0, 1], [-1, 3]], dtype=torch.float64)[:, g.rank : g.rank + 1].requires_grad_()
        o = regions.copy_to(x, g, "f") @ w1.t()
        y = regions.reduce_from(o @ w2.t(), g, "g")
        y.mean().backward()
        # O = [[-2, 4], [-2, 13], [-2, 22]]; columns of W2 sum to 0 and 6, so dO = [0, 6]/9 in every row
        close(y.detach(), torch.tensor([[6.0, 4, 14], [24, 13, 41], [42, 22, 68]], dtype=torch.float64))
        close(x.grad, torch.tensor([[12.0, 6, 0]], dtype=torch.float64).expand(3, 3) / 9)
        close(w1.grad, torch.tensor([[[0.0, 0, 0]], [[72, 90, 108]]], dtype=torch.float64)[g.rank] / 9)
        close(w2.grad, torch.tensor([[-6.0], [39]], dtype=torch.float64)[g.rank].expand(3, 1) / 9)

    local.run_threads(work, 2)


# ---- pairs that move slices ----


def whole_consumers(g: Group, dim: int) -> None:
    """gather_from and scatter_to between whole work: z = w2 * gather(scatter(w1 * x))."""
    sizes, shape = SIZES[g.size], [3, 4, 5]
    shape[dim] = 7
    x, w = randn(*shape), randn(*shape, seed=1)
    wx = leaf(x)
    (wx.sin() * w).backward(w)
    px = leaf(x.transpose(0, 2).contiguous().transpose(0, 2))
    piece = regions.scatter_to(px.sin(), g, "scatter", dim, sizes)
    assert piece.shape[dim] == sizes[g.rank]
    z = regions.gather_from(piece * w.split(sizes, dim)[g.rank], g, "gather", dim, sizes)
    close(z.detach(), x.sin() * w)
    z.backward(w.transpose(0, 2).contiguous().transpose(0, 2))
    close(px.grad, wx.grad)


def sequence_parallel(g: Group, dim: int) -> None:
    """A slice of the sequence, gathered before split work, whose partial sums are reduced back into slices: every rank's own gradient is
    that of its slice in the whole computation."""
    sizes, shape = SIZES[g.size], [3, 4, 5]
    shape[dim] = 7
    x, dy = randn(*shape), randn(*shape, seed=1)
    scales = [randn(*shape, seed=10 + rank) for rank in range(g.size)]
    wx = leaf(x)
    whole = sum((wx * scale).tanh() for scale in scales)
    whole.backward(dy)
    px = leaf(x.split(sizes, dim)[g.rank])
    everything = regions.gather_sequence(px, g, "gather", dim, sizes)
    y = regions.reduce_scatter_sequence((everything * scales[g.rank]).tanh(), g, "scatter", dim, sizes)
    close(y.detach(), whole.detach().split(sizes, dim)[g.rank])
    y.backward(dy.split(sizes, dim)[g.rank])
    close(px.grad, wx.grad.split(sizes, dim)[g.rank])
    assert {(op, name) for _, op, name in g.counters.sites} == {
        ("all_gather", "gather"),
        ("reduce_scatter", "scatter"),
        ("all_gather", "scatter.grad"),
        ("reduce_scatter", "gather.grad"),
    }


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("check", [whole_consumers, sequence_parallel])
def test_slices(check: Callable[[Group, int], Any], size: int, dim: int) -> None:
    local.run_threads(check, size, dim)


def test_reduced_in_both_directions() -> None:
    """The sum of squares of a norm over a split axis: y_i = x_i * s(sum of x^2), every rank with its own x_i."""

    def work(g: Group) -> None:
        x = randn(7)
        wx = leaf(x)
        (wx * (wx.square().sum() + 1).rsqrt()).backward(x)
        own = leaf(x.split(SIZES[g.size])[g.rank])
        total = regions.copy_to(regions.reduce_from(own.square().sum(), g, "n"), g, "n")
        (own * (total + 1).rsqrt()).backward(x.split(SIZES[g.size])[g.rank])
        close(own.grad, wx.grad.split(SIZES[g.size])[g.rank])

    local.run_threads(work, 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_in_the_backward_pass(reentrant: bool) -> None:
    """Under torch's checkpointing the forward collectives run again, in the same order on all ranks, and the gradients stay right."""

    def work(g: Group) -> None:
        x, own = randn(7), randn(7, seed=5 + g.rank)
        wx = leaf(x)
        sum((wx * randn(7, seed=5 + rank)).tanh() for rank in range(g.size)).backward(x)

        def block(value: torch.Tensor) -> torch.Tensor:
            return regions.reduce_from((regions.copy_to(value, g, "f") * own).tanh(), g, "g") * 1

        px = leaf(x)
        checkpoint(block, px, use_reentrant=reentrant).backward(x)
        close(px.grad, wx.grad)
        # without re-entering, torch stops the recomputation where all that was saved has been restored: before g
        assert {name: tally.calls for (_, _, name), tally in g.counters.sites.items()} == {"g": 1 + reentrant, "f.grad": 1}

    local.run_threads(work, 3)


def test_expanded_gradients() -> None:
    """sum().backward() hands over a gradient whose memory is one element."""

    def work(g: Group) -> None:
        x = randn(3, 4).requires_grad_()
        regions.copy_to(x, g, "f").sum().backward()
        close(x.grad, torch.full((3, 4), float(g.size), dtype=torch.float64))
        p = randn(2, 4).requires_grad_()
        regions.gather_sequence(p, g, "s", 0, (2,) * g.size).sum().backward()
        close(p.grad, torch.full((2, 4), float(g.size), dtype=torch.float64))

    local.run_threads(work, 3)


ALL: list[Callable[[torch.Tensor, Group], torch.Tensor]] = [
    lambda x, g: regions.copy_to(x, g, "n"),
    lambda x, g: regions.reduce_from(x, g, "n"),
    lambda x, g: regions.gather_from(x, g, "n", 0, (4,) * g.size),
    lambda x, g: regions.scatter_to(x, g, "n", 0, (4, *[0] * (g.size - 1))),
    lambda x, g: regions.gather_sequence(x, g, "n", 0, (4,) * g.size),
    lambda x, g: regions.reduce_scatter_sequence(x, g, "n", 0, (4, *[0] * (g.size - 1))),
]


@pytest.mark.parametrize("region", ALL)
def test_no_graph_where_no_gradient_is_wanted(region: Callable[[torch.Tensor, Group], torch.Tensor]) -> None:
    def work(g: Group) -> None:
        assert region(torch.ones(4), g).grad_fn is None
        with torch.no_grad():
            assert region(torch.ones(4, requires_grad=True), g).grad_fn is None
        assert region(torch.ones(4, requires_grad=True), g).grad_fn is not None

    local.run_threads(work, 2)
    x = torch.ones(4, requires_grad=True)
    assert region(x, group.single()).equal(x)  # one rank: the identity, gradient included
    assert group.single().counters.sites == {}


@pytest.mark.parametrize("region", ALL)
def test_second_derivatives_are_refused(region: Callable[[torch.Tensor, Group], torch.Tensor]) -> None:
    def work(g: Group) -> None:
        x = torch.ones(4, requires_grad=True)
        (first,) = torch.autograd.grad(region(x * x, g).pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()

    local.run_threads(work, 2)


def test_input_is_not_changed() -> None:
    def work(g: Group) -> None:
        x = randn(4)
        regions.reduce_from(x, g, "n")
        regions.reduce_from(x.clone().requires_grad_(), g, "n")
        assert x.equal(randn(4))
        assert collectives.all_reduce(x, g, "n").equal(g.size * x)

    local.run_threads(work, 2)
