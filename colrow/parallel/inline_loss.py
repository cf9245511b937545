"""The loss of models whose forward computes it on the spot, where the logits are the rank's slice (T5, BART, Whisper, BERT's pretraining).

Most models call `self.loss_function`, which head.py replaces. Others write `CrossEntropyLoss()(logits.view(-1, vocab_size), labels)` in
their forward. While such a forward runs with labels, the head's output is followed through the torch functions that are called on it:
those that work column by column keep it a slice, cross entropy becomes the parallel one, and whatever else wants the logits gets them
whole. So nothing is ever computed from a slice taken for the whole. Not here: which logits are cut (the plan's head region).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..comm import regions
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from ..planning.plan import Region
from .linear import OUTPUT_DIM
from .loss import parallel_cross_entropy
from .state import State

T = torch.Tensor
RESIZE = {T.view, T.reshape}
KEEP = {T.add, T.sub, T.mul, T.div, T.__add__, T.__radd__, T.__sub__, T.__mul__, T.__rmul__, T.__truediv__, torch.add, torch.mul}
KEEP |= {T.to, T.float, T.double, T.contiguous, T.clone, T.type_as, T.tanh, torch.tanh, T.__getitem__}
JOIN = {torch.stack, torch.cat}
ASK = {T.size, T.dim, T.numel, T.is_floating_point, T.type, T.__len__, T.register_hook, T.get_device}
WHOLE = "loss.logits"  # the call site where a function without a local form gets whole logits


def computes_own(model: nn.Module) -> bool:
    """Whether the model's forward never asks for `self.loss_function`."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "loss_function" not in code.co_names


def install(model: nn.Module, state: State, region: Region) -> None:
    """Follows the head's slices through each forward of `model` that is given labels."""
    assert region.partition is not None
    followers: list[Follow] = []
    for name in [region.made] if region.made else _heads(model, state, region.partition):
        model.get_submodule(name).register_forward_hook(lambda _, __, out: followers[-1].begin(out) if followers else None)

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:
            followers.append(Follow(state.group, region.partition))  # type: ignore[arg-type]
            followers[-1].__enter__()

    def after(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if followers and kwargs.get("labels") is not None:
            followers.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=True)


def _heads(model: nn.Module, state: State, cut: Partition) -> list[str]:
    """The model's output embeddings, or, where it names none that is cut, the linear layers whose output features are cut as the logits."""
    found = []
    for name, entry in state.plan.names():
        path, _, key = name.rpartition(".")
        dim = next((d for kind, d in OUTPUT_DIM.items() if isinstance(model.get_submodule(path), kind)), None)
        if key == "weight" and dim is not None and entry.partition.dim == dim and entry.partition.pieces == cut.pieces:
            found.append(path)
    named: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return [path for path in found if model.get_submodule(path) is named] or found


class Follow(TorchFunctionMode):
    """`cut` are the tensors known to be slices of the logits, kept alive so that their ids stay theirs."""

    def __init__(self, group: Group, partition: Partition) -> None:
        super().__init__()
        self.group, self.partition = group, partition
        self.cut: dict[int, torch.Tensor] = {}

    def begin(self, logits: torch.Tensor) -> None:
        self.cut[id(logits)] = logits

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        mine = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and id(x) in self.cut]
        if not mine or func in ASK or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func is F.cross_entropy and id(kwargs.get("input", args[0] if args else None)) in self.cut:
            return self._cross_entropy(*args, **kwargs)
        if func in RESIZE:
            args = (args[0], *self._sizes(args[1:]))
        elif func not in KEEP and not self._joined(func, args, kwargs):
            args, kwargs = tree_map(self._whole, (args, kwargs))
            return func(*args, **kwargs)
        width, out = mine[0].shape[-1], func(*args, **kwargs)
        if out.shape[-1:] != (width,):
            raise UserError(
                "the model's forward rearranges the columns of cut logits", getattr(func, "__name__", func), "a plan whose head is whole"
            )
        self.cut[id(out)] = out
        return out

    def _joined(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether slices, and nothing else, are laid side by side: the logits of several codebooks."""
        if func not in JOIN or not all(id(x) in self.cut for x in args[0]):
            return False
        dims = args[0][0].dim() + (func is torch.stack)
        return (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % dims != dims - 1

    def _sizes(self, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sizes of a view, with the rank's number of columns for the vocabulary's."""
        flat = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
        if flat and flat[-1] == self.partition.size:
            flat[-1] = self.partition.local_size(self.group.rank)
        return tuple(flat)

    def _whole(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or id(x) not in self.cut:
            return x
        sizes = [self.partition.local_size(rank) for rank in range(self.group.size)]
        return regions.gather_from(x, self.group, WHOLE, x.dim() - 1, sizes)

    def _cross_entropy(self, input: torch.Tensor, target: torch.Tensor, weight: Any = None, **options: Any) -> torch.Tensor:
        if weight is not None or target.is_floating_point():
            whole = self._whole(input)
            return F.cross_entropy(whole, target, weight, **options)
        known = {key: options[key] for key in ("ignore_index", "label_smoothing", "reduction") if key in options}
        return parallel_cross_entropy(input, target, self.group, self.partition, **known)
