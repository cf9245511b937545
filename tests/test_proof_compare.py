"""Comparing results: what counts as equal, what as rounding, what as a bug."""

from __future__ import annotations

import math

import pytest
import torch

from colrow.proof import compare
from colrow.proof.compare import Comparison, Item
from colrow.proof.noise import add_noise
from colrow.proof.precision import Float64, tolerance
from colrow.proof.report import Report, describe

from . import tiny


def test_differences_are_relative_to_the_largest_element():
    whole = torch.tensor([100.0, 1e-3])
    assert compare.difference(whole, whole + torch.tensor([0.0, 1e-3])) == (pytest.approx(1e-5, rel=1e-3), 100.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_on_one_side_are_never_equal(bad):
    whole = torch.tensor([1.0, 2.0])
    split = torch.tensor([1.0, bad])
    assert not compare.item("logits", "x", whole, split, tolerance=1e9).ok
    assert not compare.item("logits", "x", split, whole, tolerance=1e9).ok


@pytest.mark.parametrize("kind", ["logits", "loss", "decoding", "gradients"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_on_both_sides_proves_nothing(kind, bad):
    both = torch.tensor([1.0, bad, 2.0])
    found = compare.item(kind, "x", both, both, tolerance=1e9)
    assert not found.ok
    assert found.detail == "the whole model gives 1 of 3 entries that are no finite number"
    assert found.verdict == "nothing"
    text = describe(Comparison((found,)), lambda: None)
    assert "the whole model gives 1 of 3 entries that are no finite number; nothing can be proven beside it" in text
    alone = compare.item(kind, "x", torch.tensor([1.0, 0.0, 2.0]), both, tolerance=1e9)
    assert (alone.ok, alone.verdict) == (False, "bug")
    assert alone.detail == "the split model gives 1 of 3 entries that are no finite number"


def test_scores_that_are_ruled_out_are_compared_by_their_places():
    out = -math.inf
    whole = torch.tensor([1.0, out, 2.0])
    assert compare.item("logits", "x", whole, whole, tolerance=0.0).ok
    assert not compare.item("logits", "x", whole, torch.tensor([1.0, out, 2.5]), tolerance=1e-3).ok, "what is left is compared"
    assert not compare.item("logits", "x", whole, torch.tensor([out, 1.0, 2.0]), tolerance=1e9).ok
    assert not compare.item("gradients", "x", whole, whole, tolerance=1e9).ok, "no gradient is ruled out"
    assert not compare.item("logits", "x", torch.full((3,), out), torch.full((3,), out), tolerance=1e9).ok, "nothing is left"


def test_a_tolerance_without_bound_passes_nothing():
    assert not Item("gradients", "w", 0.0, math.inf).ok
    assert not Item("gradients", "w", math.inf, math.inf).ok


def test_shapes_must_be_equal():
    found = compare.item("logits", "x", torch.zeros(2, 3), torch.zeros(3, 2), tolerance=1.0)
    assert not found.ok
    assert found.detail == "shape (3, 2) instead of (2, 3)"


def test_a_nan_in_the_difference_is_not_ok():
    assert not Item("logits", "x", math.nan, 1.0).ok


def test_rounding_is_told_from_a_bug_by_the_models_own_error():
    own = 1e-6
    allowed = tolerance(torch.float32, own)
    kinds = {far: Item("logits", "x", far, allowed, own_error=own).verdict for far in (5e-6, 4e-5, 1e-2)}
    assert kinds == {5e-6: "equal", 4e-5: "rounding", 1e-2: "bug"}


def test_an_empty_comparison_proves_nothing():
    assert not Comparison(()).ok


def test_merging_keeps_the_worst_and_names_its_rank():
    good, bad = Item("gradients", "w", 0.0, 1e-10), Item("gradients", "w", 1.0, 1e-10)
    merged = compare.merge([Comparison((good,)), Comparison((bad,))])
    assert [(i.difference, i.detail) for i in merged.items] == [(1.0, "on rank 1")]


def test_first_differing_token_is_a_tie_or_a_bug_by_the_margin():
    logits = torch.tensor([[0.0, 5.0, 1.0], [3.0, 3.0 - 1e-6, 0.0]])
    assert compare.tokens((1, 0), (1, 0), logits, gap=1e-5).ok
    tie = compare.tokens((1, 0), (1, 1), logits, gap=1e-5)
    assert tie.ok
    assert "a tie within rounding" in tie.detail
    bug = compare.tokens((1, 0), (2, 0), logits, gap=1e-5)
    assert not bug.ok
    assert bug.detail == "token 0: 2 instead of 1, the whole model's best two are 4 apart"
    assert not compare.tokens((1, 0), (1,), logits, gap=1e-5).ok


def test_inside_float64_nothing_is_rounded_to_float32():
    x = torch.tensor([1 + 1e-12], dtype=torch.float64)
    with Float64():
        kept = [x.to(torch.float32), x.float(), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32), x.type(torch.float32)]
        assert all(t.dtype == torch.float64 for t in kept)
        assert torch.zeros(1, dtype=torch.float32).dtype == torch.float64
    assert x.float().dtype == torch.float32


def test_noise_leaves_no_bias_zero_and_no_norm_at_one():
    model = tiny.whole(tiny.config("gpt2"))
    for p in model.parameters():
        torch.nn.init.constant_(p, 1.0 if p.dim() == 1 else 0.0)
    add_noise(model)
    for name, p in model.named_parameters():
        assert p.std() > 0, name
        assert p.dim() == 1 or p.abs().max() < 4, name


def test_the_report_says_equal_only_if_everything_is():
    good, bad = Item("logits", "logits", 1e-7, 1e-5), Item("gradients", "w", 1.0, 1e-5)
    report = Report("title", Comparison((good,)), "")
    assert report.exit_code == 0
    assert report.text().splitlines()[-1].startswith("equal: ")
    assert "coarse" not in report.text()
    assert "coarse: 32% of" in Report("title", Comparison((Item("gradients", "w", 0.1, 0.32),)), "").text()  # bfloat16
    both = Comparison((good, bad))
    report = Report("title", both, describe(both, lambda: None))
    assert report.exit_code == 1
    assert "different: the forward pass is right; first on the way back, the gradient of w" in report.text()
    assert max(map(len, report.text().splitlines())) <= 100


def test_the_report_breaks_no_name():
    name = "model.vision_tower.vision_model.encoder.layers.26.self_attn.out_proj.weight"
    assert name in Report("title", Comparison((Item("gradients", name, 1e-7, 1e-5), Item("gradients", "w", 0.0, 1e-5))), "").text()
