"""Settings that a user gives. No torch here, so that a wrong value is refused before anything heavy is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


INT8 = "int8"  # of linear layers' weights alone, for commands that only generate


def check_dtype(dtype: Any, int8: bool = False) -> str:
    """The name of a dtype ("float32", torch.float32), if models can be loaded in it. "auto" is the files' own. `int8`: whether that will do
    too."""
    name = str(dtype).removeprefix("torch.")
    if name == INT8 and not int8:
        raise UserError("int8 is for run, chat and serve; verify shows its error", name, ", ".join(DTYPES))
    if name not in (*DTYPES, INT8):
        raise UserError("there is no such dtype", name, ", ".join((*DTYPES, *([INT8] if int8 else []))))
    return name


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0 is greedy, and then the seed, top-k, top-p and min-p have no meaning.

    `top_k` 0, `top_p` 1 and `min_p` 0 mean: no such limit. Among equal scores top-k keeps the lowest ids, so exactly k tokens stay.
    `repetition_penalty` None is the one of the model's generation config, 1 is none.
    Raises UserError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError("temperature must be a number of at least 0", self.temperature, "--temperature 0.7, or 0 for greedy")
        if self.top_k < 0:
            raise UserError("top-k must be at least 0", self.top_k, "--top-k 40, or 0 for no limit")
        if not 0 < self.top_p <= 1:
            raise UserError("top-p must lie in (0, 1]", self.top_p, "--top-p 0.9")
        if not 0 <= self.min_p <= 1:
            raise UserError("min-p must lie in [0, 1]", self.min_p, "--min-p 0.05")
        if not (self.penalty > 0 and math.isfinite(self.penalty)):
            raise UserError("repetition penalty must be above 0", self.repetition_penalty, "--repetition-penalty 1.1, or 1 for none")

    @property
    def penalty(self) -> float:
        """The repetition penalty as a number; 1 is none."""
        return 1.0 if self.repetition_penalty is None else self.repetition_penalty

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def single(self) -> bool:
        """One candidate a rank is enough: greedy, or a draw from the untruncated distribution."""
        return self.greedy or (self.top_k == 0 and self.top_p == 1 and self.min_p == 0)
