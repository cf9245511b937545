"""The page: whole, self-contained, well formed, and with the study's numbers in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from colrow.cli.plan import sampling
from colrow.planning import links
from colrow.planning.derive import derive
from colrow.planning.study import Question, Study
from colrow.proof.compare import Comparison, Item
from colrow.proof.report import Report
from colrow.report import diagram, html, verification
from colrow.report.page import page

from . import tiny
from .test_planning_study import study

VOID = {"meta", "input", "br"}


class Checker(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def well_formed(text: str) -> None:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert {"main", "svg", "table", "style", "script"} <= checker.seen


def small(family: str, ranks: int, **changes: Any) -> str:
    cfg = tiny.config(family, **changes)
    of = Study.of(cfg, derive(cfg, ranks), links.machine("cpu"), Question(train=True, context=32), sampling(cfg))
    return page("a <b> & c", of)


@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("llama", 2), ("llama-tied", 5), ("gpt2", 3), ("qwen2", 16)])
def test_small_models(family: str, ranks: int) -> None:
    text = small(family, ranks)
    well_formed(text)
    assert "a &lt;b&gt; &amp; c" in text
    assert "a <b> & c" not in text


def test_it_loads_nothing() -> None:
    text = page("llama-3-70b", study())
    assert not re.search(r"""(src|href)=|@import|url\(|https?://""", text)
    well_formed(text)


def test_the_figures_are_there() -> None:
    text = page("llama-3-70b", study())
    for figure in ("3,932,160", "2,621,440", "16,384", "81.9 kB", "35.3 GB", "160"):
        assert figure in text, figure
    for name in ("model.embed_tokens.weight", "model.layers.0-79.mlp.down_proj.weight", "lm_head.weight"):
        assert name in text, name


def test_the_diagram_follows_the_plan() -> None:
    """Two axes in a block, f before and g after each; uneven parts are drawn as they are."""
    cfg = tiny.config("llama")
    plan = derive(cfg, 2)
    block = diagram.layer(plan)
    found = diagram.axes(plan, block)
    assert [a.title for a in found] == ["q_proj, k_proj, v_proj, o_proj", "gate_proj, up_proj, down_proj"]
    for axis, f, g in zip(found, ("input_layernorm", "post_attention_layernorm"), ("self_attn.o_proj", "mlp.down_proj"), strict=True):
        assert axis.f is not None
        assert axis.g is not None
        assert (axis.f.module, axis.g.module) == (f"{block}.{f}", f"{block}.{g}")
    text = diagram.block(plan, 1, 8, 4)
    assert "5 query, 2 KV heads" in text
    assert "26x72" in text
    assert "25x72" in text


def test_numbers_for_people() -> None:
    assert [html.size(n) for n in (12, 16_384, 35.3e9)] == ["12 B", "16.4 kB", "35.3 GB"]
    assert [html.duration(s) for s in (2.5, 0.0123, 4.2e-6)] == ["2.5 s", "12.3 ms", "4.2 µs"]
    assert [html.short(n) for n in (1.234, 12_345, 999_999.7, 92_775_721, 1.5e9)] == ["1.23", "12,345", "1 M", "92.8 M", "1,500 M"]


def test_the_page_of_a_proof() -> None:
    good = Item("logits", "prefill", 1e-15, 1e-10)
    bad = Item("gradients", "model.layers.1.<x>.weight", 0.5, 1e-10, detail="half of it")
    equal = verification.page(Report("a model on 2 ranks", Comparison((good,)), ""))
    well_formed("<svg></svg>" + equal)
    assert "<h1>equal</h1>" in equal
    assert "1.0e-15" in equal
    different = verification.page(Report("a model on 2 ranks", Comparison((good, bad)), "first in layer 1", ("note",)))
    assert "different: first in layer 1" in different
    assert "model.layers.1.&lt;x&gt;.weight" in different
    assert "0 of 1" in different
