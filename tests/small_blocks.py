"""Small hand-written models for tests of the deriver: an embedding, two blocks that a test makes, a norm, a head."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from colrow.planning.choose import Choice, choose
from colrow.planning.graph import Graph
from colrow.planning.plan import Plan
from colrow.planning.record import record
from colrow.planning.replay import check
from colrow.planning.words import plan_of

H, I, V = 12, 60, 101


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Feed(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I, bias=bias), nn.Linear(I, H, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Model(PreTrainedModel):
    """Embedding, blocks that a subclass makes, norm, head."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__(PreTrainedConfig(vocab_size=V))
        self.embed, self.norm, self.head = nn.Embedding(V, H), Norm(), nn.Linear(H, V, bias=False)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def block(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def model_of(block: type[nn.Module], device: str) -> Model:
    cls = type("Tested", (Model,), {"block": lambda self: block()})
    with torch.device(device):
        return cls().eval()


def derived(block: type[nn.Module], ranks: int = 2, replay: bool = True) -> tuple[Choice, Plan]:
    """The choice and the plan for a model of two such blocks; the plan is replayed with numbers."""
    trace = record(model_of(block, "meta"), bypasses=True)
    choice = choose(Graph(trace), ranks)
    plan = plan_of(choice, "", ())
    assert not replay or check(trace, plan).ok
    return choice, plan


def places(plan: Plan, op: str) -> list[str]:
    return [r.name for r in plan.regions if r.op == op and ".0." in f"{r.module}."]
