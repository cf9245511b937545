"""Run under torchrun by test_train_replicas.py: dp x tp ranks train a tiny model; rank 0 compares it with the unsplit one."""

from __future__ import annotations

import copy
import sys

import torch
from torch.nn import functional as F

from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_parameters
from colrow.planning.derive import derive
from colrow.train.gradients import clip_grad_norm
from colrow.train.replicas import Replicas
from colrow.train.step import backward, check_same_data

from . import tiny


def main(dp: int, tp: int, mode: str) -> None:
    replicas = Replicas.join(dp, tp)
    assert replicas.mesh.mesh_dim_names == ("dp", "tp")
    config = tiny.config("qwen2")
    whole = tiny.whole(config)
    model = parallelize(copy.deepcopy(whole), derive(config, tp), replicas.group, mode)  # type: ignore[arg-type]
    ddp = replicas.wrap(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
    for step in range(3):
        rows = [tiny.ids(config, batch=1, length=5 + 3 * n, seed=10 * step + n) for n in range(4)]  # replicas have other numbers of tokens
        batches = [{"input_ids": row, "labels": row} for row in replicas.rows(rows)]
        check_same_data(batches, replicas.group)
        share = backward(ddp, batches, replicas=replicas.size, total=replicas.total(batches))
        loss = replicas.mean(share)
        norm = clip_grad_norm(model, 0.5)
        logits = [whole(row).logits[0, :-1] for row in rows]
        expected = F.cross_entropy(torch.cat(logits), torch.cat([row[0, 1:] for row in rows]))
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        assert abs(loss - float(expected.detach())) < 1e-9, (loss, float(expected.detach()))
        assert abs(float(norm) - float(expected_norm)) < 1e-9
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = whole_parameters(model)
    for name, p in whole.named_parameters():
        assert (found[name] - p).abs().max() < 1e-9, name
    print(f"replica {replicas.index} rank {replicas.group.rank} ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
