"""docs/theory.md: its figures computed by the planner, its identities with real numbers. A figure that is not on the page fails too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig

from colrow.comm import collectives, regions
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.planning import cost, degrees, links, timing, wire
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.planning.price import alternatives

from .paper_models import PAPER_MODELS, paper_row
from .test_planning_study import study

PAGE = (Path(__file__).parents[1] / "docs" / "theory.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
T = 4


def on_page(*figures: str) -> None:
    assert [f for f in figures if f not in TEXT] == []


def plan(ranks: int = T) -> Plan:
    return study("llama-3-70b", 4).rows[ranks].plan


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_one_all_reduce_serves_the_mlp_forward_and_backward() -> None:
    """The page's formulas with f and g on four ranks, against the whole MLP: values and all gradients."""
    x, a, b = drawn(2, 3, 8), drawn(8, 12), drawn(12, 8)
    whole = [v.clone().requires_grad_() for v in (x, a, b)]
    out = F.gelu(whole[0] @ whole[1]) @ whole[2]
    out.square().sum().backward()

    def rank(group: Group) -> list[torch.Tensor]:
        piece = slice(3 * group.rank, 3 * group.rank + 3)
        mine = [v.clone().requires_grad_() for v in (x, a[:, piece], b[piece])]
        hidden = F.gelu(regions.copy_to(mine[0], group, "f") @ mine[1])
        assert hidden.shape == (2, 3, 12 // T)
        partial = hidden @ mine[2]
        assert partial.shape == (2, 3, 8)
        assert not torch.allclose(partial, out)
        full = regions.reduce_from(partial, group, "g")
        full.square().sum().backward()
        assert {name for (_, _, name) in group.counters.sites} == {"f.grad", "g"}
        return [full.detach(), *(v.grad for v in mine)]

    results = run_threads(rank, T)
    for full, dx, _, _ in results:
        torch.testing.assert_close(full, out.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(dx, whole[0].grad, rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.cat([r[2] for r in results], 1), whole[1].grad, rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.cat([r[3] for r in results], 0), whole[2].grad, rtol=0, atol=1e-9)


def test_dx_is_a_sum_over_ranks_and_the_nonlinearity_is_a_boundary() -> None:
    dy, a = drawn(2, 3, 12), drawn(8, 12)
    parts = [dy[..., 3 * r : 3 * r + 3] @ a[:, 3 * r : 3 * r + 3].T for r in range(T)]
    torch.testing.assert_close(sum(parts), dy @ a.T, rtol=0, atol=1e-12)
    x = drawn(2, 3, 8)
    summands = [x[..., 2 * r : 2 * r + 2] @ a[2 * r : 2 * r + 2] for r in range(T)]
    torch.testing.assert_close(sum(summands), x @ a, rtol=0, atol=1e-12)
    assert not torch.allclose(sum(F.gelu(s) for s in summands), F.gelu(x @ a))


def test_two_mistakes_about_f_and_g() -> None:
    """Section 3: without f the gradient before it is a part; with an all-reduce that adds again backward it is t times too large."""
    x, a, b = drawn(2, 3, 8), drawn(8, 12), drawn(12, 8)
    before = x.clone().requires_grad_()
    (F.gelu(before @ a) @ b).square().sum().backward()

    class AddsAgain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, group: Group) -> torch.Tensor:
            ctx.group = group
            return collectives.all_reduce(y, group, "g")

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return collectives.all_reduce(grads[0], ctx.group, "g.grad"), None

    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        piece = slice(3 * group.rank, 3 * group.rank + 3)
        mine = [x.clone().requires_grad_() for _ in range(2)]
        regions.reduce_from(F.gelu(mine[0] @ a[:, piece]) @ b[piece], group, "g").square().sum().backward()
        AddsAgain.apply(F.gelu(regions.copy_to(mine[1], group, "f") @ a[:, piece]) @ b[piece], group).square().sum().backward()
        return mine[0].grad, mine[1].grad

    results = run_threads(rank, T)
    torch.testing.assert_close(sum(part for part, _ in results), before.grad, rtol=0, atol=1e-9)
    for part, double in results:
        assert not torch.allclose(part, before.grad)
        torch.testing.assert_close(double, T * before.grad, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kv", [8, 2, 1])
def test_attention_by_heads_is_a_sum_over_ranks(kv: int) -> None:
    """Section 4: query heads with their KV heads on each rank, copied where there are fewer (GQA, MQA); one sum after the projection."""
    heads, d = 8, 4
    q, k, v, o = drawn(1, heads, 5, d), drawn(1, kv, 5, d), drawn(1, kv, 5, d), drawn(heads * d, 6)

    def projected(some: list[int]) -> torch.Tensor:
        of = [h * kv // heads for h in some]
        out = F.scaled_dot_product_attention(q[:, some], k[:, of], v[:, of], is_causal=True)
        rows = torch.cat([o[h * d : h * d + d] for h in some])
        return out.transpose(1, 2).flatten(2) @ rows

    parts = [projected([2 * r, 2 * r + 1]) for r in range(T)]
    torch.testing.assert_close(sum(parts), projected(list(range(heads))), rtol=0, atol=1e-12)


def test_what_is_not_cut() -> None:
    """Section 5: a bias before g counts t times; a norm over slices needs the sum of squares of all."""
    x, b, bias = drawn(2, 12), drawn(12, 8), drawn(8)
    parts = [x[:, 3 * r : 3 * r + 3] @ b[3 * r : 3 * r + 3] + bias for r in range(T)]
    torch.testing.assert_close(sum(parts) - (T - 1) * bias, x @ b + bias, rtol=0, atol=1e-12)
    slices = x.chunk(T, -1)
    squares = sum(s.square().sum(-1, keepdim=True) for s in slices)
    whole = F.rms_norm(x, (12,), eps=1e-6)
    torch.testing.assert_close(torch.cat([s * (squares / 12 + 1e-6).rsqrt() for s in slices], -1), whole, rtol=0, atol=1e-12)
    assert not torch.allclose(torch.cat([F.rms_norm(s, (3,), eps=1e-6) for s in slices], -1), whole)


def test_past_the_host() -> None:
    found = next(p for p in cost.predict(plan(16), 1, 1, "decode") if p.section == "blocks")
    far, near = (1e6 * sum(timing.collective(replace(found, ranks=tuple(range(n))), links.machine("h100"))) for n in (16, 8))
    on_page(f"{found.logical_bytes:,} bytes is predicted at {far:.3g} µs instead of {near:.3g} µs")
    machine = links.machine("h100")
    assert 8 * machine.between.bandwidth == 400e9 < machine.link.bandwidth
    on_page("8 x 50 GB/s")


def test_the_price_of_the_other_cut() -> None:
    cfg = GPT2Config(n_embd=1024, n_inner=4096, n_layer=2, n_head=16, vocab_size=512)
    first, whole = alternatives(derive(cfg, T), "transformer.h.0.mlp.c_fc.weight", 128)
    assert "1,048,576 bytes before transformer.h.0.mlp.act" in first
    assert "262,144 after transformer.h.0.mlp.c_proj" in first
    assert "8,388,608 bytes instead of 2,097,152" in whole
    on_page("1,048,576", "262,144")
    (second, _) = alternatives(derive(cfg, T), "transformer.h.0.mlp.c_proj.weight", 128)
    assert "an all-gather of 1,048,576 bytes before it and one of 262,144 after it" in second
    assert alternatives(derive(cfg, T), "transformer.h.0.ln_1.weight", 128) == []


def test_heads_and_cache() -> None:
    heads = plan().attention[0]
    assert (heads.query.local_size(0), heads.kv.local_size(0)) == (16, 2)
    on_page("16 query heads and 2 KV heads")
    rows = study("llama-3-70b", 4).rows
    each = {n: f"{max(rows[n].cache_per_token):,}" for n in (1, 4, 8, 16)}
    on_page(f"{each[1]} bytes whole, {each[4]} on each rank at tp=4, {each[8]} at tp=8 and still {each[16]} at tp=16")
    latent = study("deepseek-v3", 2).rows
    assert {max(latent[n].cache_per_token) for n in latent} == {70_272}
    on_page("DeepSeek-V3 keeps 70,272 bytes a token")
    uneven = derive(LlamaConfig(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1, vocab_size=32), 2)
    assert [uneven.attention[0].query.local_size(r) for r in range(2)] == [5, 4]


def test_counts_and_bytes() -> None:
    found = cost.predict(plan(), 1, 1, "decode")
    blocks = [p for p in found if p.section == "blocks"]
    ring = cost.total(blocks)
    on_page(f"{blocks[0].logical_bytes:,} bytes; the blocks' {ring.calls} have {ring.logical_bytes:,}", f"sends {ring.sent:,}")
    on_page(f"{ring.sent * 50 / 1e6:.1f} MB/s", f"{100 * ring.sent * 50 / 450e9:.2f} %", "450 GB/s")
    for phase, each in (("train_forward", 2), ("train_backward", 2), ("decode", 2)):
        calls = [p for p in cost.predict(plan(), 1, 8, phase) if p.name.startswith("model.layers.0.")]  # type: ignore[arg-type]
        assert len(calls) == each
    batch = next(p for p in cost.predict(plan(), 32, 1, "decode") if p.section == "blocks").logical_bytes
    on_page(f"For batch 32 an all-reduce has {batch:,} bytes")
    small = LlamaConfig(hidden_size=4096, num_hidden_layers=2, intermediate_size=11008, num_attention_heads=32, vocab_size=32000)
    wide = degrees.stretch(derive(small, T), 32)
    on_page(f"moves {cost.total(cost.predict(wide, 1, 1, 'decode'), section='blocks').logical_bytes:,} logical bytes at any length")
    prompt = next(p for p in cost.predict(plan(), 1, 4096, "prefill") if p.section == "blocks").logical_bytes
    on_page(f"of {prompt:,} bytes each")


@pytest.mark.parametrize(("algorithm", "sent", "steps"), [("ring", 1.75, 14), ("two-shot", 1.75, 2), ("one-shot", 7, 1), ("tree", 1.75, 6)])
def test_the_table_of_algorithms(algorithm: wire.Algorithm, sent: float, steps: int) -> None:
    size, n = 8 * 1024, 8
    assert wire.moved(algorithm, "all_reduce", size, 0, n) == sent * size
    assert wire.steps(algorithm, "all_reduce", n) == steps


def test_the_activation_table() -> None:
    for m in PAPER_MODELS:
        row = {way: f"{size / 2**30:.1f}" for way, size in paper_row(m).items()}
        cells = (row["tensor parallel"], row["and sequence parallel"], row["and both"], row["full recomputation"])
        on_page(f"| {m.name} | {' | '.join(cells)} |")
    saved = {m.name: paper_row(m) for m in PAPER_MODELS}
    for name in ("175B", "530B"):
        on_page(f"{100 * (1 - saved[name]['and both'] / saved[name]['and sequence parallel']):.0f} %")


def test_weights_against_activations() -> None:
    moved = cost.total(cost.fully_sharded(plan()), section=None)
    on_page(f"FSDP moves {moved.logical_bytes:,} logical bytes")
    step = [p for phase in cost.STEP for p in cost.predict(plan(), 1, 1024, phase)]
    token = cost.total(step).sent / 1024
    # an all-reduce sends twice what a gather of the same bytes does, so traffic is compared, not logical bytes
    assert f"about {round(moved.sent / token, -3):,.0f} tokens a step" in TEXT


def test_the_planners_page_says_what_the_planner_says() -> None:
    from bench.published import CASES, PUBLISHED, predicted

    text = (Path(__file__).parents[1] / "docs" / "planner.md").read_text(encoding="utf-8")
    for case in CASES:
        if case in PUBLISHED:
            ours, (theirs, _) = predicted(case), PUBLISHED[case]
            assert f"| {case.ranks} | {ours:.2f} | {theirs:.2f} | {100 * (ours / theirs - 1):+.0f} % |" in text
