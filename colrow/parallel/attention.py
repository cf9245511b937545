"""Attention on the rank's own query heads, with any map from them to the rank's own KV heads.

transformers' attention functions know one map: each KV head serves `module.num_key_value_groups` consecutive query heads. Where a rank's
heads are that regular, the number is set and the model's own function runs, without copying K or V. Where they are not (9 query and 3 KV
heads on 2 ranks: the first has 5 and 2, its KV heads serve 3 and 2), the module is sent to `mapped_attention`, registered with
transformers' AttentionInterface. It cuts the map into regular runs and lets the model's own function work on each (sdpa: no copy of K and
V), or lines K and V up with the query heads by a copy and calls the function once (all others, which may hold something for each head).

The map lies on the module; whichever implementation the model's config names (eager with its caps, sinks and biases; sdpa; flash) does the
work, also if it is changed later. K and V arrive after the cache's update, so the cache holds the rank's KV heads and nothing else.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..errors import UserError
from ..planning.plan import Attention
from .prompt_attention import sdpa

NAME = "colrow"  # of the attention and the mask function in transformers' registries
BY_RUNS = (sdpa_attention_forward, sdpa)  # functions that hold nothing for each head


class Heads(NamedTuple):
    """A rank's map: local query head h uses the local KV head `kv_of[h]`, one of `kv_heads`."""

    kv_of: tuple[int, ...]
    kv_heads: int


def group_size(kv_of: tuple[int, ...], kv_heads: int) -> int | None:
    """How many consecutive query heads each KV head serves, or None where they are not served in equal, ordered runs.

    >>> group_size((0, 0, 1, 1), 2), group_size((0, 0, 0, 1, 1), 2), group_size((), 0)
    (2, None, 1)
    """
    size = len(kv_of) // kv_heads if kv_heads else 1
    return size if kv_of == tuple(kv for kv in range(kv_heads) for _ in range(size)) else None


def check(module: nn.Module, entry: Attention) -> None:
    """UserError where some rank's map cannot be carried out by this kind of attention; asked for all ranks, so that all refuse alike."""
    for rank in range(entry.query.ranks):
        size = group_size(entry.local_map(rank), entry.kv.local_size(rank))
        if size is None:
            own_function(module)
        elif size > 1 and not hasattr(module, "num_key_value_groups"):
            works = "each query head has a KV head of its own"
            raise UserError(f"{entry.module} cannot be told that {size} query heads share a KV head", type(module).__name__, works)


def apply(module: nn.Module, entry: Attention, rank: int) -> None:
    """Gives an attention module the rank's map from query to KV heads, which `check` has passed."""
    kv_of = entry.local_map(rank)
    size = group_size(kv_of, entry.kv.local_size(rank))
    if size is None:
        module.colrow_heads = Heads(kv_of, entry.kv.local_size(rank))  # type: ignore[assignment]
        route(module)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = size or 1  # type: ignore[assignment]  # 1: no function may group irregular heads by itself


def route(module: nn.Module) -> None:
    """The module looks up "colrow" from now on; everything else, the attention mask too, still follows the model's config."""
    config = own_config(module)
    config._attn_implementation = NAME


def own_config(module: nn.Module) -> Any:
    """A copy of the model's config that belongs to this module; the copy knows the original as `unsplit`."""
    config: Any = module.config
    if not hasattr(config, "unsplit"):
        private = copy.deepcopy(config)
        private.unsplit = config
        module.config = private
    return module.config


class _Seen:
    """An attention module as its attention function is to see it: with the model's config, and its own number of query heads a KV head."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups
        self.config = getattr(module.config, "unsplit", module.config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def mapped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """query [B, heads, S, d], key and value [B, KV heads, T, d] of this rank; what follows is the model's own function's business.

    Returns the heads' outputs [B, S, heads, d], and the attention weights where that function gives any.
    """
    function = own_function(module)
    heads: Heads | None = getattr(module, "colrow_heads", None)
    if heads is None:  # here because the module has a config of its own
        return function(module, query, key, value, attention_mask, **kwargs)
    kv_of = heads.kv_of
    if (query.shape[1], key.shape[1]) != (len(kv_of), heads.kv_heads):
        found, planned = f"{query.shape[1]} query and {key.shape[1]} KV heads", f"{len(kv_of)} and {heads.kv_heads}"
        raise UserError(f"{type(module).__name__} hands other heads to its attention than the plan's", found, planned)
    if function not in BY_RUNS or kwargs.get("position_bias") is not None:
        index = _index(kv_of, key.device)
        return function(_Seen(module, 1), query, key.index_select(1, index), value.index_select(1, index), attention_mask, **kwargs)
    outputs = []
    for run in runs(kv_of):
        mine, kv = slice(run.head, run.head + run.size * run.kv_heads), slice(run.kv, run.kv + run.kv_heads)
        seen = attention_mask if attention_mask is None or attention_mask.shape[1] == 1 else attention_mask[:, mine]
        outputs.append(function(_Seen(module, run.size), query[:, mine], key[:, kv], value[:, kv], seen, **kwargs)[0])
    return torch.cat(outputs, 2), None


class Run(NamedTuple):
    """Query heads from `head` on that use `kv_heads` KV heads from `kv` on, `size` consecutive ones each."""

    head: int
    kv: int
    size: int
    kv_heads: int


@functools.cache
def runs(kv_of: tuple[int, ...]) -> tuple[Run, ...]:
    """The map as few regular runs, in the order of the query heads.

    >>> runs((0, 0, 0, 1, 1)) == (Run(0, 0, 3, 1), Run(3, 1, 2, 1)), runs((0, 0, 1, 1, 2)) == (Run(0, 0, 2, 2), Run(4, 2, 1, 1))
    (True, True)
    """
    out: list[Run] = []
    head = 0
    for kv, same in itertools.groupby(kv_of):
        size = len(list(same))
        last = out[-1] if out else None
        if last and last.size == size and kv == last.kv + last.kv_heads:
            out[-1] = last._replace(kv_heads=last.kv_heads + 1)
        else:
            out.append(Run(head, kv, size, 1))
        head += size
    return tuple(out)


@functools.cache
def _index(kv_of: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Made once for each map and device: a constant of the model, not to be sent to a GPU at every step."""
    with torch.inference_mode(False):  # else training after generation could not save it for its backward pass
        return torch.tensor(kv_of, device=device)


def own_function(module: nn.Module) -> Callable[..., Any]:
    """The attention function that the model's config asks for, as the module would find it. UserError where there is none."""
    config: Any = module.config
    implementation = getattr(config, "unsplit", config)._attn_implementation
    if implementation not in ("eager", None):
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for cls in type(module).__mro__:  # transformers keeps a family's eager function beside its attention class
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    name = type(module).__name__
    raise UserError("this attention does not go through transformers' AttentionInterface", name, "an equal cut of its heads")


def _mask(*args: Any, **kwargs: Any) -> Any:
    """The mask that the model's own attention function takes."""
    config = kwargs["config"]
    return ALL_MASK_ATTENTION_FUNCTIONS[getattr(config, "unsplit", config)._attn_implementation](*args, **kwargs)


AttentionInterface.register(NAME, mapped_attention)
AttentionMaskInterface.register(NAME, _mask)
