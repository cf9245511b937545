"""LoRA on a split model beside the unsplit PEFT model: both trained a little, and what they show."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel import experts
from colrow.parallel.adapter_files import load_adapter
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients, whole_parameters
from colrow.planning.derive import derive
from colrow.proof.precision import Float64

from . import tiny
from .families import FAMILIES, PLAIN
from .splitting import TOLERANCE, decode, next_token_loss

PREFIX = "base_model.model."
EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GREEDY_STEPS = 3
MORE = {"bert": lambda: BertConfig(**PLAIN, is_decoder=True)}


def noisy(model: nn.Module) -> nn.Module:
    """PEFT starts with B = 0, behind which any fault could hide."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=draw, dtype=torch.float64))
    return model


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 7, "target_modules": EVERY_LINEAR, "task_type": "CAUSAL_LM", **options})


def observe(model: Any, ids: torch.Tensor, gradients: Any, parameters: Any) -> dict[str, torch.Tensor]:
    """Logits, cached decoding, gradients, and the adapter after three steps of AdamW, by the names of the split model."""
    with Float64(), torch.no_grad():
        found = {"logits": model(ids).logits, "cached": decode(model, ids, GREEDY_STEPS)[0]}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        with Float64():
            next_token_loss(model(ids).logits, ids).backward()
        if step == 0:
            found |= {f"gradient of {name}": g.clone() for name, g in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"{name} after AdamW": p.clone() for name, p in parameters(model).items() if "lora_" in name}


def own(model: nn.Module, gradient: bool) -> dict[str, torch.Tensor]:
    found = {name: p.grad if gradient else p.detach() for name, p in model.named_parameters()}
    return {name.removeprefix(PREFIX): value for name, value in found.items() if value is not None}


@functools.cache
def reference(family: str, targets: tuple[str, ...], **options: Any) -> tuple[Any, Any, Any, dict[str, torch.Tensor]]:
    """(whole model without adapter, PEFT's model, ids, what it shows)."""
    made = (FAMILIES | MORE).get(family)
    cfg = made() if made else tiny.config(family, **options)
    whole = tiny.whole(cfg)
    experts.choose(whole)
    ids = tiny.ids(cfg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = noisy(get_peft_model(copy.deepcopy(whole), lora(target_modules=list(targets)))).eval()
    mine = copy.deepcopy(peft)
    return whole, peft, ids, observe(mine, ids, lambda m: own(m, True), lambda m: own(m, False))


def split(whole: nn.Module, ranks: int, task: Any) -> list[Any]:
    """`task(group, split model)` on every rank."""
    plan = derive(whole.config, ranks)
    copies = [copy.deepcopy(whole) for _ in range(ranks)]
    return run_threads(lambda group: task(group, parallelize(copies[group.rank], plan, group)), ranks)


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert a.keys() == b.keys()
    return max((float((a[name] - b[name]).abs().max()), name) for name in a)


def check(family: str, targets: list[str], ranks: int, directory: Path, **options: Any) -> None:
    """PEFT's adapter, saved by PEFT and loaded onto the split model, does there what it does on the whole one."""
    whole, peft, ids, expected = reference(family, tuple(targets), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.save_pretrained(directory)

    def task(group: Group, model: Any) -> dict[str, torch.Tensor]:
        load_adapter(model, directory, trainable=True)
        return observe(model, ids, whole_gradients, whole_parameters)

    for found in split(whole, ranks, task):
        worst = largest(expected, found)
        assert worst[0] <= TOLERANCE, worst
