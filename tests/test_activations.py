"""Activation memory: Korthikanti's formulas reproduced exactly on their block, and predictions against what real processes keep."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bench.activations import ALLOWED, WAYS, Case, measured, predicted
from colrow.comm import launch
from colrow.comm.group import Group
from colrow.parallel.saved import Living
from colrow.parallel.sequence import Sequence
from colrow.parallel.sites import Silent
from colrow.planning.memory import Recompute, activations_of_layer
from colrow.planning.sequence import Cut

from .gpt_block import Block

S, B, H, A = 24, 2, 64, 4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("ranks", "sequence"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_the_papers_block_keeps_what_the_papers_formula_says(ranks: int, sequence: bool, recompute: Recompute) -> None:
    """sbh(34 + 5as/h), sbh(10 + 24/t + 5as/ht), sbh/t(34 + 5as/h); without 5as/h where scores are computed again; 2sbh: to the byte."""
    group = Group(0, ranks, Silent(0), torch.device("meta"), tuple(range(ranks)))
    stream = Sequence(group, Cut(frozenset(), "block", "", again=True)) if sequence else None
    block = Block(H, A, group, stream, recompute == "selective")
    whole = torch.empty(B, S, H, dtype=torch.float16, device="meta", requires_grad=True)
    living = Living(block)
    living.own.add(whole.untyped_storage()._cdata)
    with living, stream.saving() if stream is not None else contextlib.nullcontext():
        x = (whole if stream is None else stream.enter(whole)) * 1  # the block before
        y = checkpoint(block, x, use_reentrant=False) if recompute == "full" else block(x)
        graph = y.grad_fn
        del x, y
        if stream is not None:
            stream.forget()
        found = living.nbytes()
    assert graph is not None
    assert found == activations_of_layer(S, B, H, A, ranks, sequence, recompute)


@pytest.mark.process
def test_predicted_and_measured_agree() -> None:
    """Two processes, every way: tp, with sequence parallelism, with recomputation. Within 10 % of what torch's allocator gave out."""
    for way in (WAYS[0], WAYS[1], WAYS[4]):
        case = Case(way, layers=2, hidden=64, heads=4, seq=96)
        for expected, found in zip(predicted(case, 2), launch.spawn(measured, 2, (case,)), strict=True):
            assert abs(found - expected) <= ALLOWED * found, way
