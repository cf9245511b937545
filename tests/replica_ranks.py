"""What the ranks of test_train_replicas.py do. Under torchrun (main): the library's loop, compared with the unsplit model."""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from colrow.comm.collectives import gather_objects
from colrow.comm.group import Group
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_parameters
from colrow.planning.derive import derive
from colrow.proof.precision import Float64
from colrow.train.data import Row, window
from colrow.train.gradients import clip_grad_norm
from colrow.train.master import MasterWeights
from colrow.train.replicas import Replicas
from colrow.train.settings import Settings
from colrow.train.step import backward, check_same_data
from colrow.train.trainer import Resumed, SavedAt, Step, Trainer, adamw

from . import tiny
from .families import FAMILIES

STEPS = 6
SETTINGS = Settings(steps=STEPS, batch=2, accumulate=2, lr=5e-3, warmup=1, clip=0.5, save_every=2)
"""Windows of 4, 4 and 1 of the 9 rows: with 2 replicas a micro-batch each, and with the last window nothing for one of them."""


@functools.cache
def model(family: str = "qwen2", **changes: Any) -> tuple[PreTrainedConfig, nn.Module]:
    config = tiny.config(family, **changes) if family in tiny.FAMILIES else FAMILIES[family]()
    whole: Any = tiny.whole(config, attention="sdpa")
    if whole._can_set_experts_implementation():
        whole.set_experts_implementation("eager")
    return config, whole


def rows(count: int = 9) -> list[Row]:
    draw = torch.Generator().manual_seed(2)
    made = [tuple(torch.randint(3, 101, (5 + 3 * (n % 4),), generator=draw).tolist()) for n in range(count)]
    return [Row(ids, ids, tuple(range(len(ids)))) for ids in made]


def split(replicas: Replicas, sequence: str = "off", dtype: torch.dtype = torch.float64, **of: Any) -> Any:
    config, whole = model(**of)
    return parallelize(copy.deepcopy(whole).to(dtype), derive(config, replicas.group.size), replicas.group, sequence)  # type: ignore[arg-type]


def steps_of_whole() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and last parameters of a loop of torch's own, over the joined rows of each step."""
    whole: Any = copy.deepcopy(model()[1])
    optimizer = adamw(dict(whole.named_parameters()), SETTINGS)
    losses, norms = [], []
    for step in range(STEPS):
        ids = [torch.tensor([row.ids]) for row in window(rows(), step, 4, SETTINGS.seed)]
        loss = F.cross_entropy(torch.cat([whole(x).logits[0, :-1] for x in ids]), torch.cat([x[0, 1:] for x in ids]))
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), SETTINGS.clip)))
        for group in optimizer.param_groups:
            group["lr"] = SETTINGS.rate(step, STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach() for name, p in whole.named_parameters()}


def trained(replicas: Replicas, part: Any, settings: Settings, out: Path | None = None, until: int | None = None) -> tuple[list, Trainer]:
    trainer = Trainer(part, rows(), settings, out, rows(3), replicas=replicas)
    events = []
    for event in trainer.run():
        events.append(event)
        if isinstance(event, SavedAt) and event.step == until:
            break
    return events, trainer


def run(world: Group, dp: int, out: Path | None, until: int | None) -> tuple[list[float], list[float], list[int], dict]:
    replicas = Replicas.of(world, dp)
    events, trainer = trained(replicas, split(replicas), SETTINGS, out, until)
    steps = [e for e in events if isinstance(e, Step)]
    return [e.loss for e in steps], [e.norm for e in steps], [e.tokens for e in steps], whole_parameters(trainer.model)


def sixteen_bits(world: Group) -> None:
    """bfloat16, rows as micro-batches: the masters' gradients are the float32 sums that one replica accumulates. Twice: nothing is left."""
    replicas, batches = Replicas.of(world, 2), [{"input_ids": tiny.ids(model()[0], batch=1, seed=n)} for n in range(4)]
    batches = [b | {"labels": b["input_ids"]} for b in batches]
    one, all_ = (split(replicas, dtype=torch.bfloat16) for _ in range(2))
    master, expected = MasterWeights(one), MasterWeights(all_)
    with pytest.raises(UserError, match="replicas in 16 bits need masters"):
        replicas.wrap(one)
    ddp = replicas.wrap(one, master)
    for times in (1, 2):
        mine = replicas.rows(batches)
        loss = replicas.sum(backward(ddp, mine, replicas=2, total=replicas.total(mine)))
        assert abs(loss - backward(all_, batches)) < 1e-6
        for name, p in master.parameters.items():
            grad = expected.parameters[name].grad
            assert p.grad.dtype is torch.float32
            assert (p.grad - grad).abs().max() <= 1e-5 * grad.abs().max(), (times, name)
        master.write_back()
        for held in (master, expected):
            for p in held.parameters.values():
                p.grad = None
        assert all(p.grad is None for p in one.parameters())


def dropout(world: Group, out: Path) -> None:
    """Replicas drop other places; a run that is resumed drops what it would have dropped."""
    replicas = Replicas.of(world, 2)
    of = {"family": "gpt2", "resid_pdrop": 0.1, "attn_pdrop": 0.1}
    straight, _ = trained(replicas, split(replicas, **of), SETTINGS)
    trained(replicas, split(replicas, **of), SETTINGS, out, 2)
    resumed, trainer = trained(replicas, split(replicas, **of), SETTINGS, out)
    assert isinstance(resumed[0], Resumed)
    losses = [[e.loss for e in events if isinstance(e, Step)] for events in (straight, resumed)]
    assert losses[0][2:] == losses[1]
    assert len({trainer.model.colrow.masks.seed} | set(gather_objects(trainer.model.colrow.masks.seed, world, "seeds"))) == 2


def experts(world: Group) -> None:
    """A parameter that no step uses, and experts: what DDP should not wait for. One replica of four ranks has the same losses."""
    found = []
    for dp in (2, 1):
        replicas = Replicas.of(world, dp)
        config, whole = model("mixtral")
        part: Any = parallelize(copy.deepcopy(whole), derive(config, replicas.group.size), replicas.group)
        part.model.norm.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))  # which nothing uses
        entry = replace(part.colrow.plan.tensor("model.norm.weight"), name="model.norm.bias", shape=(3,))
        part.colrow.plan = replace(part.colrow.plan, tensors=part.colrow.plan.tensors | {entry.name: entry})
        with Float64():
            events, _ = trained(replicas, part, SETTINGS)
        found.append([e.loss for e in events if not isinstance(e, SavedAt)])
    assert found[0] == pytest.approx(found[1], abs=1e-10)


def other_data(world: Group) -> None:
    replicas = Replicas.of(world, 2)
    given = rows()
    if world.rank == 3:
        given = [replace(row, labels=(*row.ids[:-1], row.ids[-1] + 1)) for row in given]
    Trainer(split(replicas), given, SETTINGS, replicas=replicas).one_step()


def main(dp: int, tp: int, mode: str) -> None:
    replicas = Replicas.join(dp, tp)
    assert replicas.mesh is not None
    assert replicas.mesh.mesh_dim_names == ("dp", "tp")
    config, whole = model()
    whole = copy.deepcopy(whole)
    part = split(replicas, mode)
    ddp = replicas.wrap(part)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (part, whole)]
    for step in range(3):
        ids = [tiny.ids(config, batch=1, length=5 + 3 * n, seed=10 * step + n) for n in range(4)]  # replicas have other numbers of tokens
        batches = [{"input_ids": row, "labels": row} for row in replicas.rows(ids)]
        check_same_data(batches, replicas.group)
        share = backward(ddp, batches, replicas=replicas.size, total=replicas.total(batches))
        loss = replicas.sum(share)
        norm = clip_grad_norm(part, 0.5)
        logits = [whole(row).logits[0, :-1] for row in ids]
        expected = F.cross_entropy(torch.cat(logits), torch.cat([row[0, 1:] for row in ids]))
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert abs(loss - float(expected.detach())) < 1e-9, (loss, float(expected.detach()))
        assert abs(float(norm) - float(expected_norm)) < 1e-9
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = whole_parameters(part)
    for name, p in whole.named_parameters():
        assert (found[name] - p).abs().max() < 1e-9, name
    print(f"replica {replicas.index} rank {replicas.group.rank} ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
