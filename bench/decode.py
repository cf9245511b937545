"""Greedy decoding of a real model at several ranks, over gloo and over shared memory, in one run.

    python bench/decode.py [MODEL] [--tp 2] [--tokens 64] [--dtype float32]

Prints tokens per second after the first token, and per token of rank 0: collectives, milliseconds waiting for the other ranks, milliseconds
moving bytes. The same text must come out both times.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from colrow.checkpoint import model_dir
from colrow.comm import launch
from colrow.comm.group import Group
from colrow.engine.engine import Engine
from colrow.parallel import build, load
from colrow.planning.derive import derive

PROMPT = "Explain in a few sentences why the sky is blue."


def decode(group: Group, name: str, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Loads, generates a few tokens to warm up, then `tokens`."""
    found = model_dir.find(name)
    config = found.config()
    model = build.split(build.empty(config, dtype), derive(config, group.size), group)
    load.from_source(model, found.source(), dtype)
    engine = Engine(model.eval(), group, found.tokenizer() if group.rank == 0 else None)
    with torch.inference_mode():
        for _ in engine.stream([PROMPT], max_new_tokens=4):
            pass
        group.counters.reset()
        text = "".join(chunk.texts[0] for chunk in engine.stream([PROMPT], max_new_tokens=tokens))
    steps, total = engine.clock.steps - 1, group.counters.total(phase="decode")
    return {
        "text": text,
        "rate": engine.clock.decode_rate,
        "calls": total.calls / steps,
        "waiting": total.waiting / steps * 1e3,
        "moving": total.moving / steps * 1e3,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", nargs="?", default="demo")
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--dtype", default="float32")
    arguments = options.parse_args()
    texts = set()
    for backend in ("gloo", "shm"):
        result = launch.spawn(decode, arguments.tp, (arguments.model, arguments.tokens, getattr(torch, arguments.dtype)), backend)[0]
        texts.add(result["text"])
        print(
            f"{backend:<5} {result['rate']:6.2f} tokens/s; per token {result['calls']:.0f} collectives, "
            f"{result['waiting']:.2f} ms waiting, {result['moving']:.2f} ms moving",
            flush=True,
        )
    print(f"the same text: {len(texts) == 1}: {texts.pop()!r}")


if __name__ == "__main__":
    main()
