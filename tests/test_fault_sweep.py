"""A sample of the sweep of planted faults (fault_sweep.py), and its page: nothing that found a place was missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .families import FAMILIES
from .fault_sweep import CAUGHT, MISSED, NO_PLACE, WORDS, sees

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("phi3", "flat segments"),
        ("bloom", "constants of the first rank"),
        ("gemma3", "add up twice"),
        ("deepseek-v3", "drop f"),
        ("qwen3-moe", "drop the sum of copied heads"),
    ],
)
def test_the_gate_sees(family: str, fault: str) -> None:
    assert sees(family, fault) == CAUGHT


def test_a_fault_without_a_place_is_told_apart() -> None:
    assert sees("mistral", "bias on every rank") == NO_PLACE


@pytest.mark.skipif(not PAGE.exists(), reason="the page is made by fault_sweep.py")
def test_the_page_has_every_family_and_no_miss() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    header, rows = rows[0], rows[1:]
    assert header[1:] == list(WORDS.values())
    assert {row[0] for row in rows} <= set(FAMILIES)
    assert len(rows) > 30
    assert MISSED not in {cell for row in rows for cell in row}
    assert {cell for row in rows for cell in row[1:]} <= {CAUGHT, NO_PLACE}
