"""Every fault of tests/faults.py planted in every family of tests/families.py: does the gate see it? `make faults` writes docs/faults.md.

A fault that finds no place in a family (no bias to count twice, no constant to slice) is "-" there. The test suite runs a sample.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from colrow.planning.derive import derive
from colrow.proof.gate import GateRefused, prove
from colrow.proof.shrink import Small

from .families import FAMILIES
from .faults import FAULTS, OF_OTHERS, plant

CAUGHT, NO_PLACE, MISSED = "caught", "-", "MISSED"
WORDS = {
    "drop g": "missing all-reduce",
    "add up twice": "double all-reduce",
    "drop f": "missing f",
    "bias on every rank": "bias per rank",
    "rotated head map": "wrong map",
    "flat segments": "wrong segment",
    "mean over the slice": "norm over the slice",
    "residual on every rank": "residual per rank",
    "constants of the first rank": "constants not sliced",
    "rotated slices": "constants of another rank",
    "drop the sum of copied heads": "copies not summed",
}
RANKS = {"drop the sum of copied heads": 4, "rotated head map": 2}
"""Numbers of ranks at which a fault has a place in more families; 2 otherwise."""

INTRODUCTION = """\
# Planted faults

Made by `python -m tests.fault_sweep docs/faults.md`. Each classic fault of tensor parallelism is planted (`tests/faults.py`) in the code
that really runs, in each family of `tests/families.py`, and the gate is asked. "-": the fault has no place in that family's plan (no row
bias, one KV head for each query head, no fused tensor, no norm over a cut axis, no constant with an entry per head).
"""


def sees(family: str, fault: str) -> str:
    """What the gate says of a fault in a family."""
    config = FAMILIES[family]()
    small = Small(config, derive(config, RANKS.get(fault, 2)), ())
    with plant(fault) as places:
        try:
            prove(small)
        except GateRefused:
            return CAUGHT if places else "refused without a fault"
    return MISSED if places else NO_PLACE


def table(families: Iterable[str]) -> str:
    lines = ["| family | " + " | ".join(WORDS.values()) + " |", "|" + "---|" * (len(WORDS) + 1)]
    counts = dict.fromkeys((CAUGHT, NO_PLACE, MISSED), 0)
    for family in families:
        found = [sees(family, fault) for fault in WORDS]
        for one in found:
            counts[one] = counts.get(one, 0) + 1
        lines.append(f"| {family} | " + " | ".join(found) + " |")
        print(lines[-1], flush=True)
    total = f"**{counts[CAUGHT]} of {counts[CAUGHT] + counts[MISSED]} faults that found a place are caught**, with transformers "
    return f"{INTRODUCTION}\n{total}{transformers.__version__} and torch {torch.__version__}.\n\n" + "\n".join(lines) + "\n"


assert set(WORDS) == {*FAULTS, *OF_OTHERS}

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = table(FAMILIES)
    for target in sys.argv[1:]:
        Path(target).write_text(text)
