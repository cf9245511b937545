"""Norms of a prompt in one pass: as exact as the modules, found by trying, and only where they are what they look like."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.engine import Engine
from colrow.kernels import norm
from colrow.parallel import prompt_norms
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive

from . import tiny
from .families import FAMILIES

needed = pytest.mark.skipif(norm.library() is None, reason="this processor has no instructions for bfloat16")


class Rounded(LlamaRMSNorm):
    """Multiplies before it rounds, as some families do."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


class Clamped(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.clamp(-500, 500))


class Centred(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden_states) * gate


def made(kind: Any, width: int = 72, eps: float = 1e-3) -> Any:
    module = kind(width, eps=eps)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return module.bfloat16()


@needed
@pytest.mark.parametrize("width", [1, 16, 63, 72, 2049])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (LlamaRMSNorm, norm.Form(1e-3)),
        (Rounded, norm.Form(1e-3, early=False)),
        (GemmaRMSNorm, norm.Form(1e-3, 1.0, early=False)),
    ],
)
@torch.inference_mode()
def test_norms_are_found_and_as_exact_as_their_modules(kind: Any, form: norm.Form, width: int) -> None:
    module = made(kind, width)
    draw = torch.Generator().manual_seed(3)
    wide = torch.randn(2, 20, width + 5, generator=draw).bfloat16()
    for x in (wide[..., 5:], wide[:, ::2, :width], wide[0, :, 2:-3], 0.02 * wide[..., :width]):
        before = module(x)
        exact = made(kind, width).double()(x.double())
        prompt_norms.install(module)
        assert module.colrow_norm == form
        assert isinstance(module, kind)
        after = module(x)
        assert after.shape == before.shape
        assert (after - exact).abs().max() <= 1.01 * (before - exact).abs().max() + 1e-9 * exact.abs().max()
        assert (after == before).float().mean() > 0.99
        module = made(kind, width)


@needed
@torch.inference_mode()
def test_a_rows_bits_are_its_own() -> None:
    module = made(LlamaRMSNorm, 200)
    for _ in range(2):  # as two engines of one model do
        prompt_norms.install(module)
    assert type(module).__mro__[1] is LlamaRMSNorm
    x = torch.randn(50, 200).bfloat16()
    whole = module(x)
    assert torch.equal(module(x[7:40]), whole[7:40])
    x[9, 3] = float("nan")
    spoilt = module(x)
    assert spoilt[9].isnan().all()
    assert torch.equal(spoilt[10:], whole[10:])


@needed
@pytest.mark.parametrize("kind", [Clamped, Centred, Gated])
def test_what_is_none_is_left(kind: Any) -> None:
    module = made(kind)
    prompt_norms.install(module)
    assert type(module) is kind


@needed
def test_single_tokens_gradients_and_other_dtypes_are_the_modules_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module, own = made(LlamaRMSNorm), made(LlamaRMSNorm)
    prompt_norms.install(module)
    x = torch.randn(40, 72).bfloat16()
    with torch.no_grad():
        assert torch.equal(module(x[:15]), own(x[:15]))
        assert torch.equal(module(x.float()), own(x.float()))
    module(x).sum().backward()
    assert module.weight.grad is not None
    wide = made(LlamaRMSNorm).float()
    prompt_norms.install(wide)
    assert type(wide) is LlamaRMSNorm


@needed
def test_means_that_are_counted_are_left() -> None:
    """norm.py knows the means over a cut axis by their numbers in a module's forward."""
    block = nn.ModuleDict({"a": nn.Sequential(made(LlamaRMSNorm)), "b": made(LlamaRMSNorm)})
    vars(block["a"])["means_over_ranks"] = {}
    prompt_norms.install(block)
    assert type(block["a"][0]) is LlamaRMSNorm
    assert type(block["b"]) is not LlamaRMSNorm


@needed
def test_modules_of_one_class_may_differ() -> None:
    class Switched(LlamaRMSNorm):
        on = True

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) if self.on else hidden_states

    modules = nn.ModuleList([made(Switched), made(Switched)])
    modules[1].on = False
    prompt_norms.install(modules)
    assert [type(x) is Switched for x in modules] == [False, True]


@needed
@torch.no_grad()
def test_a_model_that_an_engine_had_is_saved_and_copied_whole() -> None:
    model = tiny.whole(tiny.config("llama"), torch.bfloat16, attention="sdpa")
    Engine(model, single())
    ids, file = torch.arange(40)[None], io.BytesIO()
    expected = model(ids).logits
    torch.save(model, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert [type(x) for x in again.modules()] == [type(x) for x in model.modules()]
        assert torch.equal(again(ids).logits, expected)


@needed
@pytest.mark.parametrize("family", ["mistral", "olmo2"])
@torch.no_grad()
def test_a_model_that_an_engine_had_is_split_like_any_other(family: str) -> None:
    """Its layers, and norms over an axis that is cut then (OLMo 2's of queries and keys)."""
    config = FAMILIES[family]()
    model = tiny.whole(config, torch.bfloat16, attention="sdpa")
    before, ids = copy.deepcopy(model), torch.arange(40)[None]
    Engine(model, single())
    assert any("colrow_norm" in vars(x) for x in model.modules())

    def rank(group: Group, whole: Any, opened: bool) -> torch.Tensor:
        part = parallelize(copy.deepcopy(whole), derive(config, 2), group)
        if not opened:
            Engine(part, group)
        return part(ids).logits

    expected = run_threads(rank, 2, before, False)[0]
    assert float((run_threads(rank, 2, model, True)[0] - expected).abs().max()) <= 0.02 * float(expected.abs().max())
