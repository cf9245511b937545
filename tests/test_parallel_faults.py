"""The comparison of test_parallel_models.py can fail: under each planted fault it does, and where the fault says so."""

from __future__ import annotations

import pytest

from .faults import BACKWARD, FAULTS, FORWARD, plant
from .hand_plans import hand_plan
from .splitting import TOLERANCE, ask_split, case, differences, whole, worst

SURELY = 1e-4  # far above every rounding, far below every fault


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_is_red_under(fault: str) -> None:
    at = whole(case("llama-bias"))
    plan = hand_plan(at.config, 2)
    with plant(fault):
        results = ask_split(at, plan)
    wrong = {name for result in results for name, value in differences(at.answers, result).items() if value > SURELY}
    assert any(name.startswith("gradient of") for name in wrong)
    assert ("logits" in wrong) == (fault in FORWARD)
    assert ("cached logits" in wrong) == (fault in FORWARD)


def test_the_faults_are_gone_afterwards() -> None:
    at = whole(case("llama-bias"))
    for fault in FAULTS:
        with plant(fault):
            pass
    value, where = worst(at.answers, ask_split(at, hand_plan(at.config, 2)))
    assert value <= TOLERANCE, where


def test_every_fault_is_of_one_kind() -> None:
    assert not set(FORWARD) & set(BACKWARD)
