"""What a training run is asked to do, checked before a model is opened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UserError

Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Settings:
    """`batch` rows make a micro-batch, `accumulate` of them a step. `epochs` counts where `steps` is None. `length`: tokens of a row.

    `warmup` steps rise to `lr`, then `schedule` falls to `lr * final`. `clip` 0: no clipping. `evaluate_every`, `save_every` 0: at the end.
    `dp` replicas share the rows of a step. `smoothing` of labels and `z_loss`: see parallel/loss.py; `sequence`: parallel/sequence.py.
    `lora`: the rank of an adapter that is trained instead of the weights; `lora_alpha` 0: twice that.
    """

    steps: int | None = None
    epochs: int = 1
    batch: int = 4
    accumulate: int = 1
    length: int = 512
    lr: float = 2e-5
    final: float = 0.1
    warmup: int = 0
    schedule: str = "cosine"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 0
    save_every: int = 0
    keep: int = 2
    packed: bool = True
    recompute: bool = False
    sequence: str = "off"
    dp: int = 1
    smoothing: float = 0.0
    z_loss: float = 0.0
    lora: int = 0
    lora_alpha: float = 0.0
    lora_targets: tuple[str, ...] = ()  # layers; (): every linear one but the head

    def __post_init__(self) -> None:
        for name, least in (
            ("batch", 1),
            ("accumulate", 1),
            ("epochs", 1),
            ("length", 2),
            ("keep", 1),
            ("warmup", 0),
            ("seed", 0),
            ("lora", 0),
            ("dp", 1),
        ):
            if getattr(self, name) < least:
                raise UserError(f"{name} must be at least {least}", getattr(self, name), f"--{name} {least}")
        if self.steps is not None and self.steps < 1:
            raise UserError("steps must be at least 1", self.steps, "--steps 100")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UserError("the learning rate must be above 0", self.lr, "--lr 2e-5")
        if self.lora_alpha < 0 or (not self.lora and (self.lora_alpha or self.lora_targets)):
            raise UserError("--lora-alpha and --lora-targets need --lora", self.lora_alpha or self.lora_targets, "--lora 8")
        if self.dp > self.batch * self.accumulate:
            rows = self.batch * self.accumulate
            raise UserError(f"{self.dp} replicas share the rows of a step, and it has {rows}", f"dp={self.dp}", f"--accumulate {self.dp}")
        if not 0 <= self.smoothing < 1:
            raise UserError("label smoothing must be at least 0 and below 1", self.smoothing, "--label-smoothing 0.1")
        if not (self.z_loss >= 0 and math.isfinite(self.z_loss)):
            raise UserError("the z-loss must be 0 or above", self.z_loss, "--z-loss 1e-4")
        if self.clip < 0:
            raise UserError("clip must be 0 (none) or above", self.clip, "--clip 1.0")
        if self.sequence not in ("off", "again", "keep"):
            raise UserError("no such sequence parallelism", self.sequence, "again, keep, off")
        if self.schedule not in get_args(Schedule):
            raise UserError("no such schedule", self.schedule, ", ".join(get_args(Schedule)))

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step (from 0 on) of a run of `total`: up to `lr` during warm-up, at `lr * final` in the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        part = (step - self.warmup) / max(1, total - 1 - self.warmup)
        falling = (1 + math.cos(math.pi * part)) / 2 if self.schedule == "cosine" else 1 - part
        return self.lr * (self.final + (1 - self.final) * falling)
