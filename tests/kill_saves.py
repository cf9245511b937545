"""Run by test_train_checkpoint.py: children that save checkpoint after checkpoint are killed at a random moment, many times.

Child number n overwrites every weight with the number of the step and saves. After each kill the last whole checkpoint must hold one step's
numbers and nothing else, and never be older than before. Prints how many kills hit a save in the middle.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from colrow.checkpoint.rank_files import complete, open_checkpoint
from colrow.comm.group import single
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive
from colrow.train.checkpoint import save, unfinished

from . import tiny


def main(directory: Path, kills: int) -> None:
    torch.set_num_threads(1)
    config = tiny.config("llama-tied", num_hidden_layers=1)
    model = parallelize(tiny.whole(config, torch.float32), derive(config, 1), single())
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    draw, last, hits = random.Random(3), 0, 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            for step in range(last + 1, last + 10_000):
                with torch.no_grad():
                    for p in parameters.values():
                        p.fill_(step)
                        optimizer.state[p]["momentum_buffer"] = torch.full_like(p, step)
                save(directory, step, model, parameters, optimizer)
            os._exit(1)
        while not complete(directory) or complete(directory)[-1].name.endswith(f"{last:08d}"):
            time.sleep(0.001)  # at least one whole save, so that each child comes further
        time.sleep(draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        hits += bool(unfinished(directory))
        saved = open_checkpoint(directory)
        assert saved.step > last
        for section in saved.sections():
            source = saved.source(section)
            assert len(source.tensors) == len(parameters)
            for name in source.tensors:
                assert bool((source.read(name, None, ()) == saved.step).all()), (section, name)
        saved.close()
        last = saved.step
    print(f"hits {hits}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
