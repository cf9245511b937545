"""What the tests of parallel/ share: the whole model's answers, computed once, and the same questions asked of a split model."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients, whole_parameters
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.proof.precision import Float64

from . import tiny

STEPS = 8
TOLERANCE = 1e-10

Case = tuple[str, tuple[tuple[str, Any], ...]]


def case(family: str, **changes: Any) -> Case:
    return family, tuple(sorted(changes.items()))


VARIANTS: dict[str, Case] = {
    "one-kv-head": case("llama", num_key_value_heads=1),
    "six-plain-heads": case("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6),
    "heads-wider-than-hidden": case("llama", hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    "five-words": case("llama", vocab_size=5),
    "five-words-tied": case("llama-tied", vocab_size=5),
    "gpt2-untied": case("gpt2", tie_word_embeddings=False),
}
CASES: dict[str, Case] = {family: case(family) for family in tiny.FAMILIES} | VARIANTS


@dataclass(frozen=True)
class Answers:
    """What a model says: tensors by name, all detached. `tokens` are greedy ids from the cache."""

    tensors: dict[str, torch.Tensor]
    tokens: torch.Tensor


@dataclass(frozen=True)
class Whole:
    config: PreTrainedConfig
    model: PreTrainedModel
    ids: torch.Tensor
    answers: Answers


@functools.cache
def whole(at: Case, attention: str = "eager") -> Whole:
    """The unsplit model of a case and its answers. Do not change it: take copies."""
    family, changes = at
    config = tiny.config(family, **dict(changes))
    model, ids = tiny.whole(config, attention=attention), tiny.ids(config)
    mine = copy.deepcopy(model)
    return Whole(config, model, ids, ask(mine, ids, lambda: {n: p.grad for n, p in mine.named_parameters()}, lambda: own(mine)))


def own(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def ask(model: PreTrainedModel, ids: torch.Tensor, gradients: Callable[[], dict], parameters: Callable[[], dict]) -> Answers:
    """Logits, cached decoding, loss, every gradient, parameters after an SGD and an AdamW step. The model is changed by it."""
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        found["logits"] = model(ids).logits
        cached, tokens = decode(model, ids)
        found["cached logits"] = cached
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    out = model(ids)
    loss = next_token_loss(out.logits, ids)
    loss.backward()
    found["loss"] = loss.detach()
    found |= {f"gradient of {name}": g.clone() for name, g in gradients().items()}
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters(), lr=0.01)):
        optimizer.step()
        found |= {f"{name} after {type(optimizer).__name__}": p.clone() for name, p in parameters().items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name])
    return Answers(found, tokens)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What transformers computes, but in the logits' own precision (it casts float64 down to float32)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def decode(model: PreTrainedModel, ids: torch.Tensor, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and ids of `steps` greedy steps, one token at a time through the cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model(ids, use_cache=True)
    logits, tokens = [out.logits[:, -1]], []
    for _ in range(steps):
        tokens.append(logits[-1].argmax(-1))
        out = model(tokens[-1][:, None], use_cache=True, **{name: out[name]})
        logits.append(out.logits[:, -1])
    return torch.stack(logits), torch.stack(tokens, 1)


def ask_split(at: Whole, plan: Plan, task: Callable[[Group, PreTrainedModel], Any] | None = None) -> list[Any]:
    """The same questions to the model split over threads; `task(group, model)` instead, where given. Results of all ranks."""
    copies = [copy.deepcopy(at.model) for _ in range(plan.ranks)]

    def rank(group: Group) -> Any:
        model = parallelize(copies[group.rank], plan, group)
        if task is not None:
            return task(group, model)
        return ask(model, at.ids, lambda: whole_gradients(model), lambda: whole_parameters(model))

    return run_threads(rank, plan.ranks)


def differences(expected: Answers, found: Answers) -> dict[str, float]:
    """The largest absolute difference of each item. Both must have the same items in the same shapes."""
    assert expected.tensors.keys() == found.tensors.keys()
    out = {}
    for name, tensor in expected.tensors.items():
        assert tensor.shape == found.tensors[name].shape, name
        out[name] = float((tensor - found.tensors[name]).abs().max())
    return out


def worst(expected: Answers, results: list[Answers]) -> tuple[float, str]:
    """The largest difference of any item on any rank, and where it is."""
    return max((value, f"{name} on rank {rank}") for rank, r in enumerate(results) for name, value in differences(expected, r).items())


def logits_off(whole: Any, group: Group) -> float:
    """The largest difference of the logits of `whole` and of a copy that the group's ranks split."""
    ids = tiny.ids(whole.config)
    split = parallelize(copy.deepcopy(whole), derive(whole.config, group.size), group)
    with torch.no_grad(), Float64():
        return float((split(ids).logits - whole(ids).logits).abs().max())
