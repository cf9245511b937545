"""The zoo's machinery, with a few of its rows measured here, and docs/models.md checked against the installed transformers.

The whole zoo is not run here (`make zoo` takes half an hour); a row that cannot be made again would show in the sample.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import transformers

from bench.zoo import page, row, run, sizes, tp_plan
from bench.zoo.names import architectures
from colrow.planning.derive import derive
from colrow.proof.probe import shapes

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
EQUAL = 1e-9


@pytest.mark.parametrize("architecture", ["llama", "bloom", "jamba", "t5", "gemma4_text"])
def test_configs_are_tiny_and_odd(architecture: str) -> None:
    config = sizes.config(architecture)
    assert shapes(config).elements < 2 * sizes.ENOUGH
    assert config.get_text_config(decoder=True).vocab_size == sizes.VOCABULARY
    assert config.get_text_config(decoder=True).num_attention_heads == 9


@pytest.mark.parametrize("architecture", ["qwen3_next", "bert"])
def test_a_row_is_measured(architecture: str) -> None:
    config = sizes.config(architecture)
    plans = row.plans_of(config, (2, 3))
    assert plans[3] == derive(config, 3)
    found = row.degree(config, plans[2])
    assert found["logits"] < EQUAL
    assert found["gradients"] < EQUAL
    assert found["attention"] > 0.97
    assert (found["forward"], found["backward"]) == (2, 2)


def test_coverage_is_by_elements() -> None:
    plan = derive(sizes.config("llama"), 2)
    whole = [t.name for t in plan.tensors.values() if t.partition.is_whole]
    assert all("norm" in name for name in whole)
    assert 0.98 < row.coverage(plan)["coverage"] < 1


def test_what_crashes_or_hangs_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "TIME_LIMIT", 0.0)
    cache, told = run.Cache(tmp_path), list[str]()
    run.run(["llama"], (2,), cache, lambda known: True, told.append)
    assert "no end after" in (cache.read("llama") or {})["stopped"]
    assert "STOPPED" in told[0]
    start = time.monotonic()
    run.run(["llama"], (2,), cache, lambda known: True, told.append)
    assert len(told) == 1, "what is known is not measured again"
    assert time.monotonic() - start < 5


def test_llama_is_cut_as_transformers_cuts_it() -> None:
    config = sizes.config("llama")
    found = tp_plan.compare(config, derive(config, 2))
    assert found is not None
    assert found["differ"] == []
    assert found["agree"] > 10


def test_a_plan_that_differs_is_seen() -> None:
    config = sizes.config("llama")
    found = tp_plan.compare(config, derive(config, 1))
    assert found is not None
    assert {d["ours"] for d in found["differ"]} == {"whole"}
    assert len(found["differ"]) > 5


def test_failures_are_on_the_page_and_not_among_the_proven() -> None:
    good = {"ranks": 2, "coverage": 0.99, "attention": 1.0, "forward": 2.0, "backward": 2.0, "parameters": 0.0, "notes": []}
    good |= {"logits": 1e-15, "decoding": None, "gradients": 0}
    rows = {"a": {"tp2": good}, "b": {"tp2": good | {"wrong": "differs; try"}}, "c": {"stopped": "no end"}}
    text = page.page(rows, dict.fromkeys(rows, "decoder"), {"transformers": "1"})
    assert "3 architectures: 1 equal" in text
    assert "| a | 0.99 | 1 | - | 2 + 2 + 0 | 1e-15 / - / 0 | not measured | not measured |" in text
    assert "* **b**: tp 2: differs" in text
    assert "* **c**: no end" in text
    text = page.page({"reformer": {"stopped": "AssertionError: train()"}, "c": {"stopped": "no end"}}, {}, {"transformers": "1"})
    assert "1 that colrow does not prove, 1 that do not run as a whole" in text
    assert "AssertionError" not in text


@pytest.mark.skipif(not PAGE.exists() or f"transformers {transformers.__version__}" not in PAGE.read_text(), reason="of other versions")
def test_the_page_has_every_architecture_and_only_equal_rows() -> None:
    text = PAGE.read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| \[?\w[\w-]*(\]\(#[\w-]+\))? \| [\d.]", line)]
    names = [re.sub(r"[\[\]]|\(.*?\)", "", line.split(" | ")[0].removeprefix("| ")) for line in lines]
    failed = re.findall(r"^\* \*\*([\w-]+)\*\*: ", "".join(re.split("## Not proven|## Do not run", text)[1:]), re.MULTILINE)
    assert sorted([*names, *failed]) == sorted(architectures())
    assert f"**{len(names) + len(failed)} architectures: {len(names)} equal" in text
    errors = [float(x) for line in lines for cell in line.split(" | ")[5:] for x in re.findall(r"(?:^| )(\d[\de.-]*)", cell)]
    assert max(errors) < EQUAL
    whole = text[text.index("## What stays whole") :]
    assert not re.search(r"\w(Error|Exception)\b|tensor\(|\baten\b|mixed by counts", whole), "in words, not as Python says it"
    assert len(errors) > 3 * len(names), "logits and gradients at two degrees at least"
