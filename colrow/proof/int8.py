"""What int8 weights cost: the split model's answers before and after its layers are quantized (parallel/int8.py), side by side.

No proof: int8 is another function, and this says how far away it is. The same ranks answer the same questions twice, first in the files'
own dtype, then with int8 weights, greedy tokens by the program that `run` uses. Not here: whether the split model equals the whole one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..comm.group import Group
from ..engine.decoder import Decoder
from ..engine.generate import generate
from ..engine.stopping import Limits
from ..parallel.int8 import GROUP, Quantized, quantize_layers
from ..planning.models import require_text
from .verify import Task, on_ranks

ROWS, LENGTH, TOKENS = 4, 32, 16


@dataclass(frozen=True)
class Int8Error:
    """`largest` and `typical` (root mean square): of a score's difference, of the largest and of the typical score. `divergence`: mean of
    the next token's Kullback-Leibler divergence in nats. `same` of `asked`: next tokens that are the most probable with both. `greedy`: how
    many of TOKENS greedy ones agree before the first that differs. `inside`: layers whose input is cut inside a group of weights."""

    title: str
    weights: Quantized
    largest: float
    typical: float
    divergence: float
    same: int
    asked: int
    greedy: int
    inside: int
    decoding: str

    @property
    def exit_code(self) -> int:
        return 0 if math.isfinite(self.divergence) else 1

    def text(self) -> str:
        cut = f"{self.inside} of {self.weights.layers} layers are cut inside a group of {GROUP}: other numbers of ranks round otherwise"
        lines = (
            ("weights", f"off by {self.weights.error:.2%} (root mean square), {self.weights.layers} layers on rank 0"),
            ("logits", f"off by {self.largest:.1%} of the largest at most, {self.typical:.2%} root mean square"),
            ("next tokens", f"{self.same} of {self.asked} the same; divergence {self.divergence:.1e} nats"),
            ("greedy tokens", f"the first {self.greedy} of {TOKENS} the same"),
            ("cuts", cut if self.inside else f"all between groups of {GROUP}: any number of ranks that cuts so rounds alike"),
            ("how", self.decoding),
        )
        return f"{self.title}\n" + "".join(f"{name:15}{said}\n" for name, said in lines)


def compare(name: str, task: Task, backend: str = "auto") -> Int8Error:
    """The answers of `task`'s model, which is loaded in its dtype, with and without int8 weights, on its ranks. UserError where it does not
    go on from a text by itself."""
    require_text(task.config, "verify --dtype int8")
    title = f"{name} on {task.plan.ranks} ranks: int8 weights beside {str(task.dtype).removeprefix('torch.')}"
    found: list[Int8Error] = on_ranks(_rank, task, backend, title)
    return found[0]


def _rank(group: Group, task: Task, title: str) -> Int8Error:
    model = task.split(group)
    vocab = task.config.get_text_config().vocab_size
    ids = torch.randint(vocab, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    logits, tokens, _ = _answers(model, group, ids)
    inside = _cut_inside(model, task)
    weights = quantize_layers(model)
    mine, drawn, how = _answers(model, group, ids)
    off, size = (mine - logits), logits.square().mean().sqrt()
    spread = nn.functional.kl_div(mine.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    same = int((mine.argmax(-1) == logits.argmax(-1)).sum())
    greedy = next((at for at, (a, b) in enumerate(zip(tokens, drawn, strict=True)) if a != b), len(tokens))
    largest, typical = float(off.abs().max() / logits.abs().max()), float(off.square().mean().sqrt() / size)
    return Int8Error(title, weights, largest, typical, float(spread.mean()), same, ids.numel(), greedy, inside, how)


def _answers(model: nn.Module, group: Group, ids: torch.Tensor) -> tuple[torch.Tensor, list[int], str]:
    """Scores of all positions, greedy tokens after the first row, and how these were decoded."""
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits.float()
    decoder = Decoder(model, group)
    decoder.prepare()
    steps = generate(model, group, [ids[0].tolist()], limits=Limits(TOKENS), decoder=decoder)
    return logits, [int(step.tokens[0] or 0) for step in steps], decoder.steps


def _cut_inside(model: nn.Module, task: Task) -> int:
    """Layers whose input features are cut elsewhere than between groups, on any rank."""
    names = {f"{path}.weight": 0 if isinstance(m, Conv1D) else 1 for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    count = 0
    for entry in task.plan.tensors.values():
        dim = names.get(entry.name)
        if dim is not None and not entry.partition.is_whole and entry.partition.dim == dim:
            edges = {edge for piece in entry.partition.pieces for ends in piece for edge in ends} - {entry.shape[dim]}
            count += any(edge % GROUP for edge in edges)
    return count
