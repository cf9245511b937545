"""docs/theory.md: its figures computed by the planner, its identities with real numbers. A figure that is not on the page fails too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig

from colrow.comm import regions
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.planning import cost, degrees, memory, wire
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.planning.price import alternatives

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
    for m in memory.PAPER_MODELS:
        row = {way: f"{size / 2**30:.1f}" for way, size in memory.paper_row(m).items()}
        cells = (row["tensor parallel"], row["and sequence parallel"], row["and both"], row["full recomputation"])
        on_page(f"| {m.name} | {' | '.join(cells)} |")
    saved = {m.name: memory.paper_row(m) for m in memory.PAPER_MODELS}
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
