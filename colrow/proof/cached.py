"""Cached decoding for the layer-by-layer proof: what each unit of the split model was given and made while it decoded with its cache.

A whole layer has no cache beside a split one. But what a cached layer makes of new tokens is what the layer makes without a cache of all
tokens at once. So the split model decodes first and everything that comes to its units is kept (a few tokens of hidden states); later each
whole unit gets all of it in one call (stream.py), and its last positions are what the split one must have made.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..planning.inputs import TOKENS
from .exercise import cache_name, call, mask_after
from .units import floating, units

NEW = 3  # tokens that are decoded one by one


@dataclass
class Passed:
    """Of one unit, call by call: the first floating tensor that it was given (none for an embedding) and the first that it made."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def decoded(self) -> torch.Tensor:
        """[B, NEW, ...]: what it made of the tokens that came one by one."""
        return torch.cat(self.outputs[1:], 1)

    def at_once(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """The arguments of a call without a cache, with all of this unit's input in place of theirs; None where it is of another shape."""
        leaves, shape = tree_flatten((args, kwargs))
        at = next((n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()), None)
        if at is None or not self.inputs:
            return (args, kwargs) if at is None and not self.inputs else None
        if any(x.dim() < 2 for x in self.inputs):
            return None
        everything = torch.cat(self.inputs, 1)
        if everything.shape != leaves[at].shape:
            return None
        leaves[at] = everything.to(leaves[at].dtype)
        return tree_unflatten(leaves, shape)


def decode(model: nn.Module, ids: torch.Tensor, phase: Any) -> dict[str, Passed]:
    """Runs the split model over all but the last NEW of `ids` [B, S] at once, then over these one by one with its cache. Nothing comes
    back for a model without a cache. `phase` is told what begins."""
    name = cache_name(model)
    if name is None:
        return {}
    found: dict[str, Passed] = {}
    with ExitStack() as hooks, torch.no_grad():
        for path, unit in units(model).items():
            found[path] = Passed()
            hooks.callback(unit.register_forward_hook(_keeping(found[path]), with_kwargs=True).remove)
        prompt = {TOKENS: ids[:, :-NEW]}
        given: dict[str, Any] = {}
        for new, piece in enumerate((prompt[TOKENS], *ids[:, -NEW:].split(1, 1))):
            phase("decode" if new else "decode_prompt")
            out = call(model, {TOKENS: piece}, use_cache=True, **given)
            if out.get(name) is None:
                return {}
            given = {name: out[name], **mask_after(prompt, TOKENS, new + 1, out[name])}
    phase("")
    return {path: passed for path, passed in found.items() if _positions(passed)}


def _keeping(passed: Passed) -> Any:
    def hook(unit: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        given, made = next(floating((args, kwargs)), None), next(floating(output), None)
        if given is not None:
            passed.inputs.append(given.detach().clone())
        if made is not None:
            passed.outputs.append(made.detach().clone())

    return hook


def _positions(passed: Passed) -> bool:
    """Whether its outputs are one call's after the other's, with the tokens along dim 1."""
    return len(passed.outputs) == NEW + 1 and all(x.dim() > 1 and x.shape[1] == 1 for x in passed.outputs[1:])
