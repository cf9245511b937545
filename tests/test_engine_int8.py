"""int8 weights: the same scores by program and by modules, what is exact in them, what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.engine.forward import Forward
from colrow.engine.slots import Slot
from colrow.parallel.int8 import dequantized, quantize, quantize_layers

from .test_engine_program import prepared, split, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama-bias", "llama-tied", "gpt2"])
def test_int8_weights_by_program_and_by_modules(family: str, dtype: torch.dtype) -> None:
    """Both multiply by the same numbers; the program rounds what is multiplied to 16 bits of a group's largest. Groups end in the middle of
    a slice, and the embedding that a head shares stays as it is."""

    def rank(part: Any, group: Group) -> tuple[bool, bool, float]:
        error = quantize_layers(part).error
        decoder = prepared(part, group)
        return decoder.program is not None, decoder.difference < (3e-4 if dtype is torch.float32 else 0.05), error

    changes = {} if family == "gpt2" else {"hidden_size": 144, "intermediate_size": 205}
    for program, close, error in split(whole(family, dtype, **changes), 2, rank):
        assert program
        assert close
        assert 0.001 < error < 0.01


def test_int8_of_what_is_exact_in_it_is_exact() -> None:
    numbers = torch.randint(-127, 128, (5, 130), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    numbers[:, ::64], scales = 127, torch.tensor([[0.5, 2.0, 0.25]]).expand(5, 3)
    weight = numbers * scales.repeat_interleave(64, 1)[:, :130]
    found, found_scales = quantize(weight)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantized(found, found_scales, 5, 130, dtype), weight.to(dtype))
    assert torch.equal(found_scales[0, :, :5].t(), scales)
    assert not found_scales[0, :, 5:].any()


def test_int8_shows_what_is_not_finite() -> None:
    """What is multiplied becomes whole numbers, which have no NaN: their scale has it."""
    model = whole("llama")
    model.get_input_embeddings().weight.data[2, 5] = float("nan")  # of a token that the comparison does not use
    quantize_layers(model)
    decoder = prepared(model, single())
    past = Forward(model)(torch.tensor([[1, 4, 9]]), None, None)[1]
    assert decoder.program is not None
    assert decoder.program.run([2], [Slot(past)]).isnan().all()
