"""Which families decode by a program in C, and why the others do not: writes docs/programs.md.

    python -m tests.program_sweep docs/programs.md      (make programs)

Tiny models of tests/families.py, with the attention that transformers chooses, on one rank and split over two.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.engine import Engine
from colrow.parallel import experts
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive
from colrow.planning.models import build

from . import tiny
from .families import FAMILIES, OWN_CODE, TRANSLATORS
from .test_rarer_axes import minimax

PAGE = """# Decoding by programs

For decoding, the engine records one step of the split model and runs it as instructions in C (`colrow/engine/program.py`), without
Python between them. A program is used only where its scores have been compared with the modules' on every rank, each time a model is opened
or has changed; else the modules run, which gives the same tokens at about half the speed. Written by `make programs`, from tiny models in
float32 with the attention that transformers chooses by itself; the largest difference is in parts of the largest score.

| family | instructions, one rank | two ranks | largest difference |
|---|---|---|---|
"""


def models() -> dict[str, Any]:
    configs = {family: (lambda family=family: tiny.config(family)) for family in tiny.FAMILIES} | FAMILIES | {"minimax": minimax}
    configs |= {family: make for family, make in (TRANSLATORS | OWN_CODE).items() if family != "whisper"}  # which reads no tokens
    return dict(sorted(configs.items()))


def ask(model: Any, group: Group) -> tuple[str, float]:
    """Instructions or the reason why there is no program; the difference."""
    decoder = Engine(model, group).decoder
    decoder.prepare()
    return (f"{len(decoder.program.code):,}" if decoder.program else f"modules: {decoder.why}"), decoder.difference


def line(family: str, make: Any) -> str:
    model = build(make(), dtype=torch.float32).eval()
    tiny.add_noise(model)
    experts.choose(model)
    plan, copies = derive(model.config, 2), [copy.deepcopy(model) for _ in range(2)]
    one, off = ask(model, single())
    two, off_two = run_threads(lambda group: ask(parallelize(copies[group.rank], plan, group), group), 2)[0]
    if one == two and one.startswith("modules"):
        two = "the same"
    worst = max(off, off_two)
    return f"| {family} | {one} | {two} | {f'{worst:.0e}' if worst else ''} |"


def main() -> None:
    warnings.filterwarnings("ignore")
    lines = []
    for family, make in models().items():
        lines.append(line(family, make))
        print(lines[-1], flush=True)
    Path(sys.argv[1]).write_text(PAGE + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
