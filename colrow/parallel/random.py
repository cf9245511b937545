"""Dropout in a split model: the masks of the unsplit one, whatever the number of ranks.

Masks on whole activations (the residual stream) must be the same on all ranks, masks on slices (attention heads, MLP features) must differ.
Generators cannot give both: a rank's own makes the streams diverge, a common one drops the same places in every rank's heads. Here each
mask comes from a seed that names it: the model's seed, the number of the forward pass, the module, the call, and for attention the head's
number in the whole model (other masks on slices are drawn whole and cut). So the ranks agree where they must, a head has its mask on
whichever rank it lies, and training with dropout is the same for any number of ranks, one included.

Recomputation draws the same masks again if it is told which pass it repeats (`contexts`, for torch.utils.checkpoint). torch's own
generators are neither used nor changed. Fused attention kernels draw for themselves, so attention with dropout runs through the model's
eager function, in training only. Not here: where dropout meets what (sites.py).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..comm import collectives
from ..comm.group import Group
from ..errors import UserError
from ..partition import Partition
from .sequence import Mode, Sequence
from .sites import Site, Sites, find, rates
from .state import State, state_of

ATTENTION, HEADS = 4, 1  # [B, heads, S, T]: the dims of attention's probabilities, and which of them counts heads
OTHERS = {F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.scaled_dot_product_attention}


@dataclass(eq=False)
class Masks:
    """What a model's masks depend on, and where it is. `calls`: how often each module ran in this pass."""

    group: Group
    sequence: Sequence | None = None
    seed: int | None = None
    number: int = 0
    depth: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    sites: Sites = field(default_factory=dict)
    known: tuple = ()  # the rates that `sites` were found for
    handles: list[Any] = field(default_factory=list)
    open: list[_Dropping] = field(default_factory=list)
    attention: str | None = None  # the implementation to go back to
    probe: bool = False  # a model on meta that shows where it drops

    def ensure_seed(self) -> None:
        if self.seed is None:
            mine = int(torch.randint(2**31, ())) if self.group.rank == 0 else None
            self.seed = collectives.broadcast_object(mine, self.group, "dropout.seed")

    def number_of(self, *name: object) -> int:
        text = "/".join(map(str, (self.seed, self.number, *name)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_dropout(model: nn.Module, seed: int, passes: int = 0) -> None:
    """The masks of a split model from now on: those of `seed` after so many forward passes in training. Alike on all ranks.

    Data-parallel replicas should have different seeds. Without this, rank 0 draws a seed from torch's generator.
    """
    masks = state_of(model).masks
    if masks is not None:
        masks.seed, masks.number = seed, passes


def passes(model: nn.Module) -> int:
    """How many forward passes have drawn masks: with the seed all that a checkpoint has to keep."""
    masks = state_of(model).masks
    return 0 if masks is None else masks.number


def contexts(model: nn.Module) -> Callable[[], tuple[Any, Any]]:
    """`context_fn` for torch.utils.checkpoint: the recomputation draws the masks of the pass that it repeats, and cuts as that did."""

    def make() -> tuple[Any, Any]:
        masks = state_of(model).masks
        assert masks is not None
        shape = (masks.sequence.batch, list(masks.sequence.sizes)) if masks.sequence is not None else (0, [])
        return contextlib.nullcontext(), _repeating(masks, masks.number, dict(masks.calls), shape)

    return make


@contextlib.contextmanager
def _repeating(masks: Masks, number: int, calls: dict[str, int], shape: tuple[int, list[int]]) -> Iterator[None]:
    before = masks.number, masks.calls, masks.depth
    masks.number, masks.calls, masks.depth = number, dict(calls), 1
    if masks.sequence is not None:
        masks.sequence.batch, masks.sequence.sizes = shape
    try:
        yield
    finally:
        masks.number, masks.calls, masks.depth = before


def install(model: Any, state: State) -> None:
    """Watches the model's forward passes. Sites are looked for at the first one in training mode, and again where rates were changed."""
    masks = state.masks = Masks(state.group, state.sequence)
    mode = state.sequence.mode if state.sequence is not None else "off"

    def before(module: nn.Module, _: Any) -> None:
        masks.depth += 1
        if masks.depth > 1 or masks.probe:
            return
        masks.calls.clear()
        now = rates(model) if module.training else ()
        if module.training and now != masks.known:
            _watch(model, masks, _sites(model, state, mode) if now else {})
            masks.known = now
        if now:
            masks.ensure_seed()
            masks.number += 1
        _choose_attention(model, masks, bool(now))

    def after(*_: Any) -> None:
        masks.depth -= 1

    for module in {id(m): m for m in (model, getattr(model, "base_model", model))}.values():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def _sites(model: nn.Module, state: State, mode: Mode) -> Sites:
    found = find(model, state.base, state.group, mode)
    return found if state.adapters is None else found | state.adapters.sites()


def _choose_attention(model: Any, masks: Masks, dropping: bool) -> None:
    if dropping and any(site.dims == ATTENTION for sites in masks.sites.values() for site in sites):
        if masks.attention is None and model.config._attn_implementation != "eager":
            masks.attention = model.config._attn_implementation
            model.set_attn_implementation("eager")
    elif masks.attention is not None:
        model.set_attn_implementation(masks.attention)
        masks.attention = None


def _watch(model: nn.Module, masks: Masks, sites: Sites) -> None:
    """Hooks exactly the modules that drop something."""
    while masks.handles:
        masks.handles.pop().remove()
    masks.sites = sites
    for path in sites:
        module = model.get_submodule(path)

        def before(module: nn.Module, _: Any, path: str = path) -> None:
            if masks.depth == 0 and module.training and torch.is_grad_enabled():
                works = "gradient_checkpointing_kwargs={'use_reentrant': False}"
                raise UserError(f"dropout in {path} outside the model's forward pass (recomputed?) has no mask", works=works)
            call = masks.calls[path] = masks.calls.get(path, 0) + 1
            masks.open.append(_Dropping(masks, path, call))
            masks.open[-1].__enter__()

        def after(module: nn.Module, _: Any, output: Any, path: str = path) -> None:
            if not masks.open or masks.open[-1].path != path:  # refused before it began
                return
            drop = masks.open.pop()
            drop.__exit__(None, None, None)
            if output is not None and module.training and drop.used != len(masks.sites[path]):
                raise UserError(f"{path} dropped {drop.used} times, {len(masks.sites[path])} were expected", works="dropout rates of 0")

        masks.handles.append(module.register_forward_pre_hook(before))
        masks.handles.append(module.register_forward_hook(after, always_call=True))


class _Dropping(TorchFunctionMode):
    """Within one call of a module: functional dropout with the masks of its sites."""

    def __init__(self, masks: Masks, path: str, call: int) -> None:
        super().__init__()
        self.masks, self.path, self.call, self.used = masks, path, call, 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.drop(*args, **kwargs)
        if func in OTHERS and kwargs.get("dropout_p", kwargs.get("p", 0.5)) and kwargs.get("training", "dropout_p" in kwargs):
            raise UserError(f"{self.path} draws a mask in a way that cannot be split", func.__name__, "dropout rates of 0")
        return func(*args, **kwargs)

    def drop(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if p == 0 or not training:
            return input
        sites = self.masks.sites[self.path]
        if self.used >= len(sites):
            raise UserError(f"{self.path} dropped more often than {len(sites)} times", works="dropout rates of 0")
        kept = self.mask(input, p, sites[self.used])
        self.used += 1
        return input.mul_(kept) if inplace else input * kept

    def mask(self, x: torch.Tensor, p: float, site: Site) -> torch.Tensor:
        """0 or 1/(1 - p) for each element of `x`."""
        name, shape, rank = (self.path, self.call, self.used), list(x.shape), self.masks.group.rank
        cut = site.cut if site.cut is not None and site.cut.dim is not None else None
        if cut is not None and cut.dim is not None and cut.dim < 0:
            cut = Partition(x.dim() + cut.dim, cut.pieces)
        if site.dims == ATTENTION:
            by_head = cut is not None and cut.dim == HEADS
            held = [i for start, stop in cut.pieces[rank] for i in range(start, stop)] if cut and by_head else list(range(x.shape[HEADS]))
            one = shape[:HEADS] + shape[HEADS + 1 :]
            heads = [_bernoulli(x, one, p, self.masks.number_of(*name, head)) for head in held]
            out = torch.stack(heads, HEADS) if heads else torch.empty_like(x)
        elif site.sequence and self.masks.sequence is not None and self.masks.sequence.active:
            sizes = self.masks.sequence.sizes
            shape[1] = sum(sizes)
            out = _bernoulli(x, shape, p, self.masks.number_of(*name)).split(sizes, 1)[rank]
        elif cut is not None and cut.dim is not None:
            shape[cut.dim] = cut.size
            out = cut.split(_bernoulli(x, shape, p, self.masks.number_of(*name)), rank)
        else:
            out = _bernoulli(x, shape, p, self.masks.number_of(*name))
        return out.div_(1 - p) if p < 1 else out.zero_()


def _bernoulli(like: torch.Tensor, shape: list[int], p: float, seed: int) -> torch.Tensor:
    """Ones with probability 1 - p."""
    if like.is_meta:  # for the shape alone (saved.py): meta has no generators
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    draw = torch.Generator(like.device).manual_seed(seed)
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - p, generator=draw)
