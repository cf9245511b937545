"""Forward: a transformers causal LM called with a cache, whatever its release or family calls the arguments.

The names are read from the model's own signature once: the cache is `cache` or, before transformers 5.24, `past_key_values` (`cache_params`
in recurrent models); positions and `logits_to_keep` are passed only where the model takes them. The model makes its cache itself, so it has
the kind and the number of KV heads that this rank needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..errors import UserError
from ..partition import Partition
from ..planning.inputs import CACHES

MISCOUNTS = "colrow_positions"
"""Of a cache that does not tell how many positions it stands for: their number. Caches ask their first layer, which may be one with a state
instead of positions (MiniMax); a model that counts by its cache would then take every new token for the first one."""


class Forward:
    """`Forward(model)(ids, mask, past)` -> (last logits [rows, columns of this rank], past)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self._cache_arg = next((name for name in CACHES if name in accepted), None)
        if self._cache_arg is None:
            raise UserError(f"{type(model).__name__} takes no cache, so it cannot generate", works="a causal language model")
        self.takes_positions = "position_ids" in accepted
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None, past: Any, every: bool = False) -> tuple[torch.Tensor, Any]:
        """`ids` [rows, new tokens]; `mask` [rows, all tokens] with 0 for left padding, None without padding; `past` None at first. With
        `every` the logits of all new tokens come back, [rows, new tokens, columns]."""
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, **({} if every else self._keep)}
        if past is not None:
            arguments[str(self._cache_arg)] = past
        if mask is not None:  # a row's positions count from its first real token
            arguments["attention_mask"] = mask
            if self.takes_positions:
                arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        before: int | None = getattr(past, MISCOUNTS, None)
        if before is not None and mask is None and self.takes_positions:
            arguments["position_ids"] = torch.arange(before, before + ids.shape[1], device=ids.device).expand(len(ids), -1)
        out = self._run(arguments)
        cache = self._past(out)
        miscounts = past is None and cache is not None and self.takes_positions and _length(cache) != ids.shape[1]
        if before is not None or miscounts:
            setattr(cache, MISCOUNTS, (before or 0) + ids.shape[1])
        return (out.logits if every else out.logits[:, -1]), cache

    def at(self, ids: torch.Tensor, positions: torch.Tensor, past: Any) -> torch.Tensor:
        """The last logits [rows, columns] of `ids` [rows, new tokens] at `positions`, said expressly where the model takes them."""
        said = {"position_ids": positions} if self.takes_positions else {}
        arguments = {"input_ids": ids, **said, str(self._cache_arg): past, "use_cache": True, **self._keep}
        return self._run(arguments).logits[:, -1]

    def _run(self, arguments: dict[str, Any]) -> Any:
        with local_logits(self.model):
            return self.model(**arguments)

    @staticmethod
    def _past(out: Any) -> Any:
        return next((found for name in CACHES if (found := getattr(out, name, None)) is not None), None)


def _length(cache: Any) -> int | None:
    """What a cache says of itself."""
    try:
        return cache.get_seq_length()
    except (AttributeError, ValueError):  # one of states alone
        return None


def local_logits(model: Any) -> AbstractContextManager[Any]:
    """Inside it a split model's logits are the rank's slice; an unsplit model has nothing to change."""
    if getattr(model, "colrow", None) is None:
        return nullcontext()
    from ..parallel.head import sharded_logits

    return sharded_logits(model)


def vocabulary(model: Any) -> Partition | None:
    """How the split model's logits are cut along the vocabulary; None where every rank computes all of them."""
    state = getattr(model, "colrow", None)
    return state.head.partition if state is not None and state.head is not None else None


def left_pad(prompts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ids and mask [rows, longest]; mask None where all prompts have one length. Padding is on the left so that every row's last token is
    in the last column."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    if min(map(len, prompts)) == longest:
        return ids, None
    return ids, torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
