"""Weights in twelve bits: the same bits back, products and scores of the same bits, memory let go, and what stays as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from colrow import api
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.account import Stages
from colrow.engine.engine import Engine
from colrow.engine.forward import Forward
from colrow.engine.generate import generate
from colrow.engine.settings import Sampling
from colrow.engine.slots import Slot
from colrow.engine.stopping import Limits
from colrow.kernels import compact as kernel
from colrow.kernels import many
from colrow.parallel import kept
from colrow.parallel.build import parallelize
from colrow.parallel.compact import compact_layers, uncompacted
from colrow.planning.derive import derive

from . import tiny
from .test_engine_text import byte_level

needed = pytest.mark.skipif(kernel.library() is None, reason="this processor does not multiply pairs of bfloat16")
pytestmark = [needed, pytest.mark.usefixtures("threads")]

SIZES = [(31, 370), (37, 2048), (33, 1000), (96, 1025), (66, 4095), (289, 750)]
WIDE = {"hidden_size": 630, "head_dim": 70, "intermediate_size": 2101, "vocab_size": 311}  # odd slices, a width in parts; some save nothing


def drawn(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    return (0.03 * torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))).bfloat16()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def made(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = kernel.compact(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("size", SIZES)
def test_the_same_bits_come_back(size: tuple[int, int]) -> None:
    weight = drawn(*size)
    for at, value in enumerate([float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 1e30, -1e-38, 1e-40, 3.0]):
        weight[at % len(weight), -1 - at] = weight[-1, at] = value
    weight[0, 64:77] = 1e25  # many in one line
    values, beside = made(weight)
    assert torch.equal(bits(uncompacted(values, beside, *size, torch.bfloat16)), bits(weight))
    assert values.nbytes + beside.nbytes < 0.85 * weight.nbytes
    assert torch.equal(bits(uncompacted(*made(weight.t().contiguous().t()), *size, torch.bfloat16)), bits(weight))


def test_every_bfloat16_comes_back() -> None:
    """Each of the 65,536, among others that are much alike."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    weight = torch.cat([every, drawn(256, 4096)], 1)
    assert torch.equal(bits(uncompacted(*made(weight), *weight.shape, torch.bfloat16)), bits(weight))


def test_what_would_save_little_stays_as_it_is() -> None:
    spread = (torch.rand(64, 1024, generator=torch.Generator().manual_seed(0)) * 160 - 80).exp2().bfloat16()  # of all sizes
    assert kernel.compact(spread) is None
    assert kernel.compact(drawn(64, 144)) is None  # two blocks for a little more than one
    assert kernel.compact(drawn(1, 130)) is None
    assert kernel.compact(drawn(64, 1024).float()) is None
    assert kernel.compact(drawn(64, 0)) is None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", [(37, 2048), (33, 1000), (200, 3070)])
def test_products_of_prompts_have_the_same_bits(size: tuple[int, int], biased: bool) -> None:
    weight, bias = drawn(*size), drawn(1, size[0])[0] if biased else None
    weight[3, 700:703] = weight[30, -1] = 1e10
    for tokens in (1, 15, 16, 70):
        x = drawn(tokens, size[1], seed=1)
        expected = many.product(x, weight, None, len(weight), bias, few=True)
        found = many.product(x, *made(weight), len(weight), bias, few=True)
        assert expected is not None
        assert found is not None
        assert torch.equal(bits(found), bits(expected))


def scores(model: Any, group: Group, pasts: list[Any] | None = None) -> tuple[list[torch.Tensor], list[Any], int]:
    """Of rows alone and of several together, by the program, behind the same pasts; those, and how many instructions there are."""
    decoder = Engine(model, group).decoder
    decoder.prepare()
    assert decoder.program is not None, decoder.why
    pasts = pasts or [Forward(model)(torch.tensor([[at, *range(9 * at, 10 * at)]]), None, None)[1] for at in range(1, 12)]
    alone = torch.cat([decoder.program.run([at], [Slot(past)]) for at, past in enumerate(pasts)])
    found = [alone]
    for count in (2, 3, 5, 8, 9, 11):
        together = decoder.program.run(list(range(count)), [Slot(past) for past in pasts[:count]])
        assert torch.equal(together, alone[:count]), count
        found.append(together)
    return found, pasts, len(decoder.program.code)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "llama-bias", "llama-tied", "gpt2"])
def test_decoded_scores_have_the_same_bits(family: str, ranks: int) -> None:
    changes = {"n_embd": 639, "n_inner": 2101, "vocab_size": 311} if family == "gpt2" else WIDE
    whole = tiny.whole(tiny.config(family, **changes), torch.bfloat16)
    with torch.no_grad():
        for p in whole.parameters():
            p.flatten()[7::1001] *= 1e-12  # some that no table has
    plan = derive(whole.config, ranks)
    parts = [copy.deepcopy(whole) for _ in range(ranks)]

    def rank(group: Group) -> tuple[int, bool]:
        model = parallelize(parts[group.rank], plan, group)
        plain, pasts, _ = scores(model, group)
        found = compact_layers(model)
        assert found is not None
        assert found.nbytes < 0.87 * found.before
        assert kept.nbytes(model) == found.nbytes
        after, _, _ = scores(model, group, pasts)
        return found.layers, all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))

    for layers, same in run_threads(rank, ranks):
        assert layers > 3
        assert same


def test_prompts_and_tokens_are_those_of_the_weights() -> None:
    whole = tiny.whole(tiny.config("llama", **WIDE), torch.bfloat16)
    prompt = [(7 * at + 3) % 311 for at in range(40)]

    def tokens(model: Any) -> tuple[torch.Tensor, list[int | None]]:
        engine = Engine(model, single())
        found = [step.tokens[0] for step in generate(model, single(), [prompt], Sampling(), Limits(12), decoder=engine.decoder)]
        return Forward(model)(torch.tensor([prompt]), None, None)[0], found

    expected, generated = tokens(copy.deepcopy(whole))
    assert compact_layers(whole) is not None
    found, again = tokens(whole)
    assert torch.equal(found, expected)
    assert generated == again


def test_a_weight_that_comes_back_otherwise_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    own = kernel.compact

    def wrong(weight: torch.Tensor, *more: Any) -> Any:
        found = own(weight, *more)
        if found is not None and len(weight) == 2101:
            found[0][5, 3] ^= 1
        return found

    monkeypatch.setattr(kernel, "compact", wrong)
    model = tiny.whole(tiny.config("llama", **WIDE), torch.bfloat16)
    expected = model.model.layers[0].mlp.up_proj.weight
    assert compact_layers(model) is not None
    assert model.model.layers[0].mlp.up_proj.weight is expected
    assert "weight" not in model.model.layers[0].mlp.down_proj._parameters


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_a_model_that_is_saved_has_all_its_weights(tmp_path: Path, family: str, ranks: int) -> None:
    changes = {"n_embd": 639, "n_inner": 2101, "vocab_size": 311} if family == "gpt2" else WIDE
    whole = tiny.whole(tiny.config(family, **changes), torch.bfloat16)
    plan, parts = derive(whole.config, ranks), [copy.deepcopy(whole) for _ in range(ranks)]

    def rank(group: Group) -> None:
        model = parallelize(parts[group.rank], plan, group)
        assert compact_layers(model) is not None
        model.save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="weight is kept in another form"):
            model.load_state_dict(model.state_dict())

    run_threads(rank, ranks)
    again, found = type(whole).from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(found.values())
    expected = whole.state_dict()
    assert expected.keys() == again.state_dict().keys()
    assert all(torch.equal(bits(value.bfloat16()), bits(expected[name].bfloat16())) for name, value in again.state_dict().items())


def test_layers_that_share_a_weight_share_what_is_kept() -> None:
    model = tiny.whole(tiny.config("llama", **WIDE), torch.bfloat16)
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    before = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    found = compact_layers(model)
    assert found is not None
    assert first.up_proj.kept is second.up_proj.kept
    assert found.before - found.nbytes == before - sum(p.nbytes for p in model.parameters()) - kept.nbytes(model)


def test_ranks_of_several_threads_keep_their_weights(threads: Any) -> None:
    threads(many.MOST + 1)
    assert compact_layers(tiny.whole(tiny.config("llama", **WIDE), torch.bfloat16)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_an_engine_keeps_what_it_can_so(dtype: str, tmp_path: Path) -> None:
    model = tiny.whole(tiny.config("llama", **WIDE), torch.bfloat16)
    model.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)

    def rank(group: Group) -> list[tuple[str, int, list[str]]]:
        found = []
        for wanted in (True, False):
            stages = Stages()
            engine = api.open_engine(str(tmp_path), group, gate=False, dtype=dtype, compact=wanted, stages=stages)
            text = engine.complete([[(7 * at + 3) % 311 for at in range(40)]], max_new_tokens=8)
            found.append((stages.results["decoding"], kept.nbytes(engine.model), text))
        return found

    for (told, size, text), (told_without, size_without, text_without) in run_threads(rank, 2):
        assert "instructions in C" in told
        assert text == text_without
        assert ("bits, to the bit the same" in told) == (size > size_without) == (dtype == "bfloat16")
        assert "to the bit" not in told_without
