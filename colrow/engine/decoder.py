"""Decoder: the next scores of sequences that each get one token, by a program where the model has one that was compared with its modules.

    decoder = Decoder(model, group)
    decoder.prepare()                       # a collective; afterwards `decoder.program` or the reason in `decoder.why`

The comparison: a few tokens go through the modules, then a few more both ways. All ranks use the program, or none does.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import native
from ..comm.collectives import gather_objects
from ..comm.group import Group
from ..errors import RankError
from . import compiled, recorded
from .forward import Forward
from .program import Program
from .slots import Slot

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""By dtype, the largest difference of any score, of the largest score. A program adds in another order than the modules, and in bfloat16 it
rounds less often."""
BEFORE, BESIDE = 5, 3  # tokens that the modules alone see; tokens that both see


class Decoder:
    """`program`: None before `prepare`, and where the modules run; then `why` says the reason."""

    def __init__(self, model: Any, group: Group, wanted: bool = True) -> None:
        self.program: Program | None = None
        self.why = "" if wanted else "it was not wanted"
        self.difference = 0.0
        self._forward, self._group, self._prepared = Forward(model), group, not wanted

    @property
    def steps(self) -> str:
        """How steps are made, for the user."""
        return f"decoding: {len(self.program.code)} instructions in C" if self.program else f"decoding: the model's modules ({self.why})"

    def prepare(self) -> None:
        """Once. Makes the program and compares it. A collective."""
        if self._prepared:
            return
        self._prepared = True
        phase, self._group.counters.phase = self._group.counters.phase, "prepare"
        try:
            self._prepare()
        finally:
            self._group.counters.phase = phase

    def _prepare(self) -> None:
        model, group = self._forward.model, self._group
        if model.config.is_encoder_decoder:
            self.why = "an encoder-decoder"
            return
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if group.device.type != "cpu" or len(dtypes) != 1 or not dtypes <= TOLERANCE.keys():
            self.why = f"not on a CPU in float32 or bfloat16, but {' and '.join(map(str, dtypes))} on {group.device.type}"
            return
        vocab = model.config.get_text_config().vocab_size
        tokens = [(7 * at + 3) % vocab for at in range(BEFORE + BESIDE)]
        _, past = self._forward(torch.tensor([tokens[:BEFORE]]), None, None)
        found, why = self._made(past, tokens[BEFORE], dtypes.pop())
        if not self._all_agree(why):
            return
        assert found is not None
        slot = Slot(past)
        for token in tokens[BEFORE:]:
            theirs, past = self._forward(torch.tensor([[token]]), None, past)
            mine, theirs = found.run([token], [slot]), theirs.float()
            largest = float(theirs.abs().max()) if theirs.numel() else 0.0
            difference = float((mine - theirs).abs().max()) / (largest or 1.0) if theirs.numel() else 0.0
            self.difference = max(self.difference, difference) if difference == difference else float("inf")
        close = self.difference <= TOLERANCE[found.dtype]
        if self._all_agree("" if close else f"its program differs by {self.difference:.1e} of the largest score"):
            self.program = found

    def _made(self, past: Any, token: int, dtype: torch.dtype) -> tuple[Program | None, str]:
        try:
            tape = recorded.record(self._forward.model, self._group, self._forward, past, token)
            return Program(compiled.compile(tape), self._group, dtype, torch.get_num_threads()), ""
        except (recorded.NotRecorded, native.NativeUnavailable) as error:
            return None, str(error)
        except RankError:
            raise
        except Exception as error:  # a model's code may fail where it meets what it has never met before
            return None, f"recording a step failed: {type(error).__name__}: {error}"

    def _all_agree(self, why: str) -> bool:
        """Whether no rank has a reason against it."""
        found = gather_objects(why, self._group, "engine.program")
        self.why = next((text if set(found) == {text} else f"on rank {rank} {text}" for rank, text in enumerate(found) if text), "")
        return not self.why
