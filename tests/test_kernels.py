"""The kernels for lesser processors than this one: compiled without the levels above, they give the same results within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from colrow import native
from colrow.comm.group import single
from colrow.engine.decoder import Decoder
from colrow.engine.forward import Forward
from colrow.engine.slots import Slot
from colrow.kernels import library
from colrow.parallel.int8 import quantize_layers
from tests import tiny

SIZES = {"hidden_size": 72, "intermediate_size": 1100, "vocab_size": 311}  # a width in several parts, rows of several panels


@pytest.fixture
def highest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    flags = (*(flag for flag in native.PROGRAM.flags if flag != "-O3"), "-O2", f"-DHIGHEST={request.param}")
    monkeypatch.setattr(native, "PROGRAM", replace(native.PROGRAM, module="kernels/_below", flags=flags))
    library.library.cache_clear()
    yield request.param
    library.library.cache_clear()


def scores(dtype: torch.dtype, int8: bool) -> torch.Tensor:
    """Of rows alone, which rows together must equal bit for bit."""
    model = tiny.whole(tiny.config("llama", **SIZES), dtype)
    if int8:
        quantize_layers(model)
    decoder = Decoder(model, single())
    decoder.prepare()
    assert decoder.program is not None, decoder.why
    pasts = [Forward(model)(torch.tensor([[at, *range(9 * at, 10 * at)]]), None, None)[1] for at in range(1, 12)]
    alone = torch.cat([decoder.program.run([at], [Slot(past)]) for at, past in enumerate(pasts)])
    for count in (2, 3, 5, 8, 9, 11):
        together = decoder.program.run(list(range(count)), [Slot(past) for past in pasts[:count]])
        assert torch.equal(together, alone[:count]), count
    return alone


CASES = [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.float32, True)]


@pytest.mark.parametrize("highest", [2, 3, 4], indirect=True)
def test_levels_of_processors_agree(highest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    below = [scores(*case) for case in CASES]
    monkeypatch.undo()
    library.library.cache_clear()
    for case, found in zip(CASES, below, strict=True):
        rounded = 0.02 if case[0] is torch.bfloat16 else 1e-3 if case[1] else 1e-5  # columns of bfloat16, and of 16 bits beside int8
        expected = scores(*case)
        assert float((found - expected).abs().max()) < rounded * float(expected.abs().max()), case
