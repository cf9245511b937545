"""Forward: a transformers causal LM called with a cache, whatever its release or family calls the arguments.

The names are read from the model's own signature once: the cache is `cache` or, before transformers 5.24, `past_key_values` (`cache_params`
in recurrent models); positions and `logits_to_keep` are passed only where the model takes them. The model makes its cache itself, so it has
the kind and the number of KV heads that this rank needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import UserError
from ..kernels.many import LEAST
from ..parallel.prompt_products import last_alone
from ..partition import Partition
from ..planning.inputs import CACHES, rereads
from ..planning.models import state_in_modules


class Forward:
    """`Forward(model)(ids, mask, past)` -> (last logits [rows, columns of this rank], past)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.cache_arg = next((name for name in CACHES if name in accepted), None)
        if self.cache_arg is None:
            raise UserError(f"{type(model).__name__} takes no cache, so it cannot generate", works="a causal language model")
        if rereads(model):
            what = f"{type(model).__name__} reads the whole text again for each token, which colrow's engine does not do"
            raise UserError(what, works="in Python, colrow.load(...).generate()")
        if state_in_modules(model):
            what = f"{type(model).__name__} keeps the state of one sequence in its modules, and gives no cache back"
            raise UserError(what, works="in Python, colrow.load(...).generate()")
        self.takes_positions = "position_ids" in accepted
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.chooses_rows = self.takes_positions and bool(self._keep)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None, past: Any, every: bool = False) -> tuple[torch.Tensor, Any]:
        """`ids` [rows, new tokens]; `mask` [rows, all tokens] with 0 for left padding, None without padding; `past` None at first. With
        `every` the logits of all new tokens come back, [rows, new tokens, columns]."""
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, **({} if every else self._keep)}
        if past is not None:
            arguments[str(self.cache_arg)] = past
        if mask is not None:  # a row's positions count from its first real token
            arguments["attention_mask"] = mask
            if self.takes_positions:
                arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        elif past is not None and self.takes_positions and isinstance(past, Cache):  # some models would count from 0 again (Bamba)
            first = past.get_seq_length()
            arguments["position_ids"] = torch.arange(first, first + ids.shape[1], device=ids.device)[None].expand(len(ids), -1)
        with _last_alone(ids, not every):
            out = self._run(arguments)
        return (out.logits if every else out.logits[:, -1]), _counting(self._past(out))

    def at(self, ids: torch.Tensor, positions: torch.Tensor, past: Any) -> torch.Tensor:
        """The last logits [rows, columns] of `ids` [rows, new tokens] at `positions`, said expressly where the model takes them."""
        said = {"position_ids": positions} if self.takes_positions else {}
        arguments = {"input_ids": ids, **said, str(self.cache_arg): past, "use_cache": True, **self._keep}
        return self._run(arguments).logits[:, -1]

    @torch.inference_mode()
    def begun(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The cache of `ids` [rows, tokens] at these `positions`, of a model that takes them."""
        return self._past(self._run({"input_ids": ids, "position_ids": positions, "use_cache": True, **self._keep}))

    @torch.inference_mode()
    def rows(self, ids: torch.Tensor, positions: torch.Tensor, past: Any, wanted: torch.Tensor) -> torch.Tensor:
        """The logits [rows, wanted, columns] of the `wanted` ones of `ids` [rows, new tokens] at `positions`. Only where `chooses_rows`."""
        arguments = {"input_ids": ids, "position_ids": positions, str(self.cache_arg): past, "use_cache": True, "logits_to_keep": wanted}
        with _last_alone(ids, wanted.tolist() == [ids.shape[1] - 1]):
            return self._run(arguments).logits

    def _run(self, arguments: dict[str, Any]) -> Any:
        with local_logits(self.model):
            return self.model(**arguments)

    @staticmethod
    def _past(out: Any) -> Any:
        return next((found for name in CACHES if (found := getattr(out, name, None)) is not None), None)


def _last_alone(ids: torch.Tensor, wanted: bool) -> AbstractContextManager[Any]:
    """Leaves out what nobody asks for, where the last token's scores alone are `wanted` (tail.py)."""
    return last_alone() if wanted and ids.shape[1] >= LEAST else nullcontext()


def _counting(cache: Any) -> Any:
    """The cache, made to count by a layer that holds positions. A model asks its cache how many came before, for new tokens' positions and
    for masks, and the cache asks its first layer, which may be one that stays empty beside a state (MiniMax'): every new token would be
    taken for the first one."""
    if isinstance(cache, Cache) and not isinstance(cache, _Counting) and _holder(cache) and isinstance(cache.layers[0], CacheLayerMixin):
        kind: Any = type(cache)
        cache.__class__ = _counting_type(kind)
    return cache


def _holder(cache: Cache) -> int:
    """The first layer that holds positions; 0 where none does."""
    layers = enumerate(getattr(cache, "layers", ()))
    return next((at for at, layer in layers if isinstance(layer, CacheLayerMixin) and layer.get_seq_length()), 0)


class _Counting(Cache):
    """Answers for its first layer with one that holds positions."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx or _holder(self))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, layer_idx or _holder(self))


@functools.cache
def _counting_type(of: Any) -> Any:
    return type(of.__name__, (_Counting, of), {})


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
