"""Attention on the rank's own query heads, with any map from them to the rank's own KV heads.

transformers' attention functions know one map: each KV head serves `module.num_key_value_groups` consecutive query heads. Where a rank's
heads are that regular, the number is set and the model's own function runs, without copying K or V. Where they are not (9 query and 3 KV
heads on 2 ranks: the first has 5 and 2, its KV heads serve 3 and 2), the module is sent to `mapped_attention`, registered with
transformers' AttentionInterface, which lines K and V up with the query heads and calls the model's own function on that.

The map lies on the module; whichever implementation the model's config names (eager with its caps, sinks and biases; sdpa; flash) does the
work, also if it is changed later. K and V arrive after the cache's update, so the cache holds the rank's KV heads and nothing else.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ..errors import UserError
from ..planning.plan import Attention

NAME = "colrow"  # of the attention and the mask function in transformers' registries


def group_size(kv_of: tuple[int, ...], kv_heads: int) -> int | None:
    """How many consecutive query heads each KV head serves, or None where they are not served in equal, ordered runs.

    >>> group_size((0, 0, 1, 1), 2), group_size((0, 0, 0, 1, 1), 2), group_size((), 0)
    (2, None, 1)
    """
    size = len(kv_of) // kv_heads if kv_heads else 1
    return size if kv_of == tuple(kv for kv in range(kv_heads) for _ in range(size)) else None


def apply(module: nn.Module, entry: Attention, rank: int) -> None:
    """Gives an attention module the rank's map from query to KV heads. UserError where its kind of attention cannot take it."""
    kv_of = entry.local_map(rank)
    size = group_size(kv_of, entry.kv.local_size(rank))
    if size is None:
        own_function(module)
        module.colrow_heads = kv_of  # type: ignore[assignment]
        route(module)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = size or 1  # type: ignore[assignment]  # 1: mapped_attention hands over as many KV heads as query heads
    elif size not in (None, 1):
        works = "each query head has a KV head of its own"
        raise UserError(f"{entry.module} cannot be told that {size} query heads share a KV head", type(module).__name__, works)


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


def mapped_attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """query [B, heads, S, d], key and value [B, KV heads, T, d] of this rank; what follows is the model's own function's business."""
    kv_of = getattr(module, "colrow_heads", None)
    if kv_of is not None:
        index = _index(kv_of, key.device)
        key, value = key.index_select(1, index), value.index_select(1, index)
    return own_function(module)(module, query, key, value, *args, **kwargs)


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
