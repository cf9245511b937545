"""What the forward pass of a training step leaves in memory: measured on the real split model, run on meta tensors with a transport that
moves nothing.

    saved_bytes(config, plan, rank=0, batch=1, seq=4096, dtype=torch.bfloat16, sequence="again", recompute=False)

No weights and no other ranks are needed: collectives give tensors of the right shape, which is all that counts here. What still lives
when the loss is all that is held is what the backward pass keeps, whoever keeps it: autograd, sequence parallelism's slices, the inputs of
layers that are computed again. Each memory is counted once; parameters and buffers are not. Not here: the formulas beside it
(planning/memory.py).
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from ..comm.group import Group
from ..planning import degrees
from ..planning.derive import derive
from ..planning.plan import Plan
from . import build
from .head import sharded_logits
from .recompute import recompute_layers
from .sequence import Mode
from .sites import Silent


class _Fused(torch.autograd.Function):
    """What a fused attention kernel keeps: q, k, v, its output and a float32 number for each query and head. No scores."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("only what waits for a backward pass is counted: none is run")


class _FusedAttention(TorchFunctionMode):
    """On meta torch would follow its plain attention, which keeps every score; devices run a fused kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _Fused.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class Living(TorchDispatchMode):
    """Every memory that ops make on the meta device, as long as something holds it; not the `model`'s own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps the address from being used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.is_meta:
                storage = x.untyped_storage()
                if storage._cdata not in self.own:
                    self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result

    def nbytes(self) -> int:
        gc.collect()
        return sum(size for storage, size in self.made.values() if not storage.expired())


class _PlainCase(TorchDispatchMode):
    """Answers what a model asks about contents ("is the mask all ones?", "are positions consecutive?"): yes, the plain case."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return True if args[0].dtype is torch.bool else 0
        return func(*args, **(kwargs or {}))


def saved_bytes(
    config: PreTrainedConfig,
    plan: Plan,
    rank: int,
    batch: int,
    seq: int,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    sequence: Mode = "off",
    recompute: bool = False,
) -> int:
    """Bytes that the forward pass of a training step leaves for the backward pass on `rank`: (batch, seq) tokens, labels, loss included.

    `attention` as transformers names it; "sdpa" counts as a fused kernel, "eager" keeps the scores. `sequence` as in sequence.py.
    `recompute`: layers are computed again in the backward pass.
    """
    model = build.empty(config, dtype)
    if attention != "sdpa":
        model.set_attn_implementation(attention)
    build.split(model, plan, Group(rank, plan.ranks, Silent(rank), torch.device("meta")), sequence)
    if recompute:
        recompute_layers(model)
    model.train()
    living = Living(model)
    ids = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    all_true = fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]  # labels of which none is ignored
    with all_true, living, _PlainCase(), _FusedAttention(), sharded_logits(model):
        loss = model(ids, labels=ids, use_cache=False).loss
    found = living.nbytes()
    del loss
    return found


def activations(config: PreTrainedConfig, plan: Plan, batch: int, seq: int, dtype: torch.dtype = torch.bfloat16) -> list[int]:
    """`saved_bytes` of rank 0, which holds most, for every rank; of a model with many equal layers from runs of two and of three."""
    layers = int(getattr(config, "num_hidden_layers", 0) or 0)
    small, larger = (degrees.shortened(config, n) for n in (degrees.SHORT, degrees.SHORT + 1))
    if layers <= degrees.SHORT + 1 or small is None or larger is None:
        return [saved_bytes(config, plan, 0, batch, seq, dtype)] * plan.ranks
    short = derive(small, plan.ranks, plan.weights or None)
    if not degrees.same(degrees.stretch(short, layers), plan):
        return [saved_bytes(config, plan, 0, batch, seq, dtype)] * plan.ranks
    two = saved_bytes(small, short, 0, batch, seq, dtype)
    three = saved_bytes(larger, degrees.stretch(short, degrees.SHORT + 1), 0, batch, seq, dtype)
    return [two + (layers - degrees.SHORT) * (three - two)] * plan.ranks
