"""Models and techniques of Korthikanti et al. 2022 (arXiv:2205.05198), in the numbers of planning/memory.py's formulas."""

from __future__ import annotations

from dataclasses import dataclass

from colrow.planning.memory import Recompute, activations_of_layer


@dataclass(frozen=True)
class PaperModel:
    """A row of table 3."""

    name: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    micro_batch: int
    sequence: int = 2048


PAPER_MODELS = (
    PaperModel("22B", 64, 6144, 48, 8, 1, 4),
    PaperModel("175B", 96, 12288, 96, 8, 8, 1),
    PaperModel("530B", 128, 20480, 105, 8, 35, 1),
    PaperModel("1T", 160, 25600, 128, 8, 64, 1),
)


def paper_row(m: PaperModel) -> dict[str, float]:
    """Bytes of the layers' activations on a rank of the first stage, by technique. That stage keeps L/p layers of p micro-batches, so L."""
    ways: dict[str, tuple[bool, Recompute]] = {
        "tensor parallel": (False, "none"),
        "and sequence parallel": (True, "none"),
        "and selective recomputation": (False, "selective"),
        "and both": (True, "selective"),
        "full recomputation": (False, "full"),
    }
    at = (m.sequence, m.micro_batch, m.hidden, m.heads, m.tensor)
    return {way: m.layers * activations_of_layer(*at, sp, how) for way, (sp, how) in ways.items()}
