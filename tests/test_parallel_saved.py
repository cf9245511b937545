"""Activations of a dry run on meta against those that autograd keeps in a real run of the same rank."""

from __future__ import annotations

import copy

import pytest
import torch

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel import saved
from colrow.parallel.build import parallelize
from colrow.parallel.head import sharded_logits
from colrow.planning.derive import derive

from . import tiny

BATCH, SEQ = 2, 12


def real(family: str, ranks: int, **changes: object) -> list[int]:
    """Bytes kept on each rank of a split model with numbers in it, eager attention."""
    cfg = tiny.config(family, **changes)
    model, ids, plan = tiny.whole(cfg, torch.float32), tiny.ids(cfg, BATCH, SEQ), derive(cfg, ranks)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def rank(group: Group) -> int:
        mine = parallelize(copies[group.rank], plan, group).train()
        held = {p.untyped_storage().data_ptr() for p in (*mine.parameters(), *mine.buffers())}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in held:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), sharded_logits(mine):
            mine(ids, labels=ids, use_cache=False)
        return sum(s.nbytes() for s in kept.values())

    return run_threads(rank, ranks)


@pytest.mark.parametrize(("family", "ranks"), [("llama", 3), ("llama", 2), ("qwen2", 2), ("qwen2", 5)])
def test_a_dry_run_keeps_what_a_real_one_keeps(family: str, ranks: int) -> None:
    alike(family, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_dry_run_keeps_masks_of_dropout(ranks: int) -> None:
    alike("gpt2", ranks, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


def alike(family: str, ranks: int, **changes: object) -> None:
    cfg = tiny.config(family, **changes)
    plan = derive(cfg, ranks)
    dry = [saved.saved_bytes(cfg, plan, rank, BATCH, SEQ, torch.float32, "eager") for rank in range(ranks)]
    for found, expected in zip(dry, real(family, ranks, **changes), strict=True):
        assert abs(found - expected) <= 0.01 * expected  # masks and positions may be kept where a dry run has constants


def test_fused_attention_keeps_no_scores() -> None:
    """Twice the tokens, twice the memory."""
    cfg = tiny.config("llama", max_position_embeddings=4096)
    plan = derive(cfg, 2)
    short, long = (saved.saved_bytes(cfg, plan, 0, 1, n, torch.float32) for n in (512, 1024))
    assert long == pytest.approx(2 * short, rel=0.01)


def test_layers_add_up() -> None:
    cfg = tiny.config("llama", num_hidden_layers=6)
    plan = derive(cfg, 2)
    assert saved.activations(cfg, plan, 1, 64, torch.float32) == [saved.saved_bytes(cfg, plan, 0, 1, 64, torch.float32)] * 2
