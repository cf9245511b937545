"""Products of a prompt's tokens in C: as close to the exact values as torch's, each token's the same bits in any company, and only where
they may be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.engine import Engine
from colrow.engine.forward import Forward
from colrow.kernels import many
from colrow.parallel import prompt_products
from colrow.parallel.build import parallelize
from colrow.parallel.int8 import dequantized, quantize, quantize_layers
from colrow.planning.derive import derive

from . import tiny

pytestmark = pytest.mark.usefixtures("threads")
needed = pytest.mark.skipif(not many.helps(), reason="this processor does not multiply pairs of bfloat16, or has AMX")

SIZES = [  # tokens, rows, n
    (16, 7, 2),
    (17, 1, 34),
    (33, 97, 66),
    (70, 200, 1030),
    (130, 192, 2050),
    (200, 289, 3072),
    (1100, 40, 64),
]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    made = many.product(x, weight, None, weight.shape[0], bias)
    assert made is not None
    return made


@needed
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_as_close_to_the_exact_values_as_torchs(
    size: tuple[int, int, int], biased: bool, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, rows, n = size
    x, weight, bias = drawn(tokens, n), drawn(rows, n, seed=1), drawn(rows, seed=2) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    allowed = exact.abs() * 2**-8 + 1e-5 * n**0.5  # rounded to bfloat16, once
    monkeypatch.setattr(many, "MOST", 3)
    found = product(x, weight, bias)
    assert ((found - exact).abs() <= allowed).all()
    for count in (2, 3):
        threads(count)
        assert torch.equal(product(x, weight, bias), found)


@needed
def test_a_tokens_bits_do_not_depend_on_its_company() -> None:
    x, weight = drawn(300, 1100), drawn(110, 1100, seed=1)
    whole = product(x, weight)
    for first, last in ((0, 16), (0, 17), (5, 69), (100, 148), (44, 300)):
        assert torch.equal(product(x[first:last], weight), whole[first:last]), (first, last)
    x[7, 3], x[80, 1099] = float("nan"), float("inf")
    spoilt = product(x, weight)
    assert spoilt[7].isnan().all()
    assert not spoilt[80].isfinite().any()
    others = [at for at in range(300) if at not in (7, 80)]
    assert torch.equal(spoilt[others], whole[others])


@needed
@pytest.mark.parametrize("size", SIZES)
def test_int8_weights_are_what_they_stand_for(size: tuple[int, int, int]) -> None:
    tokens, rows, n = size
    x, (numbers, scales) = drawn(tokens, n), quantize(drawn(rows, n, seed=1).float())
    found = many.product(x, numbers, scales, rows, None)
    assert found is not None
    assert torch.equal(found, product(x, dequantized(numbers, scales, rows, n, torch.bfloat16)))


@needed
def test_inputs_as_they_lie_in_memory() -> None:
    weight = drawn(50, 64, seed=1)
    wide = drawn(4, 20, 200)
    for x in (wide[..., 8:72], wide.transpose(0, 1)[..., :64], wide[:, ::2, 3:67], drawn(4, 64, 20).transpose(1, 2)):
        assert torch.equal(product(x, weight), product(x.contiguous(), weight))
        assert product(x, weight).shape == (*x.shape[:-1], 50)
    biases = drawn(50, 2)
    assert torch.equal(product(wide[..., :64], weight, biases[:, 1]), product(wide[..., :64], weight, biases[:, 1].contiguous()))


@needed
def test_all_else_is_torchs(threads: Any) -> None:
    x, weight = drawn(20, 64), drawn(50, 64, seed=1)
    for given, by in ((x[:15], weight), (x[:, :63], weight[:, :63]), (x.float(), weight.float()), (x, weight.float()), (x, weight[:0])):
        assert many.product(given, by, None, by.shape[0], None) is None
    assert many.product(x, drawn(64, 50).t(), None, 50, None) is None
    numbers, scales = quantize(weight.float())
    for given, rows in ((drawn(20, 66), 50), (x, 65)):  # what does not fit is not read, but refused by torch in its words
        assert many.product(given, weight, None, rows, None) is None
        assert many.product(given, numbers, scales, rows, None) is None
    assert many.product(x, weight, None, 50, drawn(49)) is None
    threads(many.MOST + 1)
    assert many.product(x, weight, None, 50, None) is None
    threads(many.MOST)
    assert many.product(x, weight, None, 50, None) is not None
    threads(1)
    layer = nn.Sequential(nn.Linear(64, 50).bfloat16())
    with torch.inference_mode():
        before = layer(x)
        prompt_products.install(layer)
        assert torch.allclose(layer(x), before, rtol=2**-7, atol=1e-3)
        assert torch.equal(layer(x[:3]), F.linear(x[:3], layer[0].weight, layer[0].bias))
    layer(x).sum().backward()
    assert layer[0].weight.grad is not None


@needed
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_engine_reads_prompts_so(family: str, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer but the head, which gets one token, and with int8 weights takes it too; of two ranks' slices as well."""
    config = tiny.config(family, intermediate_size=204)
    ids = torch.tensor([[(7 * at + 1) % 101 for at in range(40)]])
    whole = tiny.whole(config, torch.bfloat16, attention="sdpa")
    with torch.no_grad():
        exact = copy.deepcopy(whole).double()(ids).logits[:, -1]
    scale, made, own = float(exact.abs().max()), list[int](), many.product

    def watched(*args: Any, **more: Any) -> Any:
        out = own(*args, **more)
        made.append(out is not None)
        return out

    monkeypatch.setattr(many, "product", watched)
    for size in (1, 2):

        def rank(group: Group) -> torch.Tensor:
            part: Any = copy.deepcopy(whole)
            part = parallelize(part, derive(config, group.size), group) if group.size > 1 else part
            if int8:
                quantize_layers(part)
            return Forward(Engine(part, group).model)(ids, None, None)[0]

        made.clear()
        found = torch.cat(run_threads(rank, size) if size > 1 else [rank(single())], 1)
        layers = sum(isinstance(x, nn.Linear) for x in whole.modules()) - (not int8)
        assert sum(made) == size * layers
        assert float((found - exact).abs().max()) <= (0.06 if int8 else 0.03) * scale
