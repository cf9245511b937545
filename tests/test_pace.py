"""The time of programs: what is predicted from a plan is what the program's instructions say, and what was measured comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colrow.__main__ import main
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import pace, pieces
from colrow.engine.slots import Slot
from colrow.planning import cost, links, program, workload
from colrow.planning.derive import derive
from colrow.planning.trace import trace

from .test_engine_program import PROMPTS, Forward, prepared, split, whole

LENGTH = 9


@pytest.fixture(autouse=True)
def little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "READ", (2 << 20, 3 << 20, 4 << 20))
    monkeypatch.setattr(pace, "WIDTH", 192)


ON_TWO = ["llama-tied", "qwen2", "gpt2", "gemma3", "mixtral", "qwen2-moe", "cohere", "deepseek-v2", "deepseek-v3", "stablelm"]
ON_TWO += ["stablelm-qk"]  # a norm for each head


@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("llama", 5), *((family, 2) for family in ON_TWO)])
def test_a_plan_says_what_the_program_does(family: str, ranks: int) -> None:
    """Operations, numbers looked at, scores, and sums, of every rank; bytes but for norms and biases, of which plans count all; about as
    many instructions between products."""

    def rank(part: Any, group: Group) -> tuple[program.Work, list[cost.Predicted]]:
        made = prepared(part, group).program
        assert made is not None
        return pieces.work(made, LENGTH), pieces.sums(made, group.size)

    model = whole(family)
    plan, of_model = derive(model.config, ranks), workload.of(trace(model.config))
    found = split(model, ranks, rank) if ranks > 1 else [rank(model, single())]
    expected = cost.predict(plan, 1, LENGTH, "decode", 4, whole_logits=False)
    small = sum(t.shape[0] for t in plan.tensors.values() if len(t.shape) == 1)
    for (work, sums), said in zip(found, program.works(plan, of_model, 1, LENGTH, 4), strict=True):
        assert work.operations == pytest.approx(said.operations)
        assert work.numbers == pytest.approx(said.numbers)
        assert work.scores == said.scores
        assert 0.6 < said.instructions / work.instructions < 1.5
        assert 0 <= said.read - work.read <= 4 * small + 1e-6
        assert sorted((s.name, s.logical_bytes) for s in sums) == sorted((p.name, p.logical_bytes) for p in expected if ranks > 1)


def test_the_time_is_the_sum_of_its_parts() -> None:
    device = links.Device("x", "x", 0, 2e9, 0, "", True, (1.0, 1.0), False, per_op=1e-6, attend=1e6, per_score=1e-7, cores=2)
    device = replace(device, reads=((1e6, 4e9), (3e6, 2e9)), steps=((1e6, 1e-3), (3e6, 3e-3)))
    machine = links.Machine(device, links.Link("x", "x", 1e9, 0.0, 2e-5, "", 0, ("one-shot",), ((4096, 2e-5), (8192, 3e-5)), 2))
    works = [program.Work(1.5e6, 1e6, 500, 10, 100), program.Work(0.5e6, 0, 100, 10, 100)]
    sums = [cost.Predicted("all_reduce", "a", 1, 8192, (0, 1), unit=4)]
    one = program.time(works, sums, machine)
    assert one.reading == pytest.approx(1.5e6 * 2 * (1 / 4e9 + 1 / 2e9) / 2)  # 2 MB in all, half way between what was measured
    assert one.computing == pytest.approx(500e-6)
    assert one.latency + one.moving == pytest.approx(3e-5)
    assert (one.touching, one.starting) == pytest.approx((1e-5, 2e-3 + 1e-5))
    assert sum(pieces.predicted(one).values()) == pytest.approx(one.total)
    further = replace(machine, device=replace(device, per_row=1e-4))
    assert program.time(works, sums, further).total == pytest.approx(one.total)
    assert program.time(works, sums, further, 5).total == pytest.approx(program.time(works, sums, machine, 5).total + 4e-4)
    many = program.time(works * 2, sums, machine, 3)
    assert many.computing == pytest.approx(3 * 2 * 500e-6 + 2 * 1e6 / (2e9 / 4))  # four ranks on two cores
    assert device.reading(5e5) == pytest.approx(4e9)
    assert device.reading(5e6) == pytest.approx(2e9)
    assert (device.beside(0), device.beside(9e9)) == (1e-3, 3e-3)


@pytest.mark.parametrize("int8", [False, True])
def test_one_rank_measures(int8: bool) -> None:
    found = pace.measure(single(), torch.float32, 0.01, int8)
    assert min(*found.reads, found.flops, found.attend, found.instruction, *found.steps) > 0
    assert min(found.score, found.row) >= 0
    assert found.sums == ()


def test_ranks_measure_together_and_the_slowest_counts() -> None:
    found = run_threads(lambda group: pace.measure(group, torch.bfloat16, 0.01), 2)
    assert all(min(p.sums) > 0 for p in found)
    device, link = pace.presets(found, "threads", 1e9)
    assert [rate for _, rate in device.reads] == [2 * min(p.reads[at] for p in found) for at in range(len(pace.READ))]
    assert device.attend == min(p.attend for p in found)
    assert [seconds for _, seconds in device.steps] == [max(p.steps[at] for p in found) for at in (0, 1)]
    assert link.times[0][1] == max(p.sums[0] for p in found)


def test_seconds_of_instructions_add_up_to_no_more_than_the_run() -> None:
    """Over a transport for which the run stops at each sum, too: these are among its seconds."""

    def rank(part: Any, group: Group) -> dict[str, float]:
        made = prepared(part, group).program
        assert made is not None
        slot = Slot(Forward(part)(torch.tensor([PROMPTS[1]]), None, None)[1])
        with pieces.timed(made) as seconds:
            made.run([5], [slot])
            first, again = seconds(), seconds()
        made.run([5], [slot])
        assert set(again.values()) == {0.0}
        return dict(first)

    for found in split(whole("llama"), 2, rank):
        assert min(found.values()) > 0
        assert pieces.whole(found, 9.0)["beside"] == pytest.approx(9 - sum(found.values()))
        assert found["sums"] > found["between"]


def test_plan_speaks_of_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "machine.json"
    assert main(["bench", "--calibrate", str(file), "--seconds", "0.05", "--dtype", "bfloat16"]) == 0
    assert "programs in C" in capsys.readouterr().out
    machine = links.machine(str(file)).program
    assert machine is not None
    assert len(machine.device.reads) == len(pace.READ)
    assert main(["plan", "qwen2.5-0.5b", "--tp", "2", "--device", str(file)]) == 0
    assert "by the model's modules tp=2 would make" in " ".join(capsys.readouterr().out.split())
    assert links.machine("cpu").program is not None
    assert main(["plan", "qwen2.5-0.5b", "--tp", "2"]) == 0
    assert "Decoding is a bound" in " ".join(capsys.readouterr().out.split())
