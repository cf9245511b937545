"""Weights in 12 bits: what a plan says of them is what programs read and ranks hold."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from colrow.__main__ import main
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.engine import account, pace, pieces
from colrow.engine.decoder import Decoder
from colrow.kernels import compact as kernel
from colrow.parallel.build import parallelize
from colrow.parallel.compact import compact_layers
from colrow.planning import compact, cost, degrees, links, memory, program, workload
from colrow.planning.derive import derive
from colrow.planning.shapes import config
from colrow.planning.study import Question, Study
from colrow.planning.trace import trace
from colrow.planning.verdict import verdict

from . import tiny

pytestmark = pytest.mark.usefixtures("threads")
can = pytest.mark.skipif(kernel.library() is None, reason="this processor does not multiply pairs of bfloat16")
WIDE = {"hidden_size": 630, "head_dim": 70, "intermediate_size": 1021, "vocab_size": 311}


def test_the_rule_is_the_kernels() -> None:
    assert (compact.BLOCK, compact.BLOCK_BYTES, compact.WORTH, compact.TABLE) == (
        kernel.BLOCK,
        kernel.BLOCK_BYTES,
        kernel.WORTH,
        kernel.TABLE,
    )


@can
@pytest.mark.parametrize(("rows", "n"), [(2048, 2048), (700, 1025), (64, 144), (1, 130), (256, 150), (100, 210)])
def test_bytes_of_a_weight(rows: int, n: int) -> None:
    weight = (0.03 * torch.randn(rows, n, generator=torch.Generator().manual_seed(0))).bfloat16()
    found = kernel.compact(weight)
    assert compact.nbytes(rows, n) == pytest.approx(weight.nbytes if found is None else sum(part.nbytes for part in found), rel=1e-3)
    assert (found is None) == (compact.nbytes(rows, n) == weight.nbytes)


@can
@pytest.mark.parametrize(("family", "ranks"), [("llama", 1), ("llama", 3), ("llama-tied", 2), ("gpt2", 2)])
def test_what_a_plan_says_is_read_and_held(family: str, ranks: int) -> None:
    changes = {"n_embd": 639, "n_inner": 1021, "vocab_size": 311} if family == "gpt2" else WIDE
    whole = tiny.whole(tiny.config(family, **changes), torch.bfloat16)
    plan, model = derive(whole.config, ranks), workload.of(trace(whole.config))
    parts = [copy.deepcopy(whole) for _ in range(ranks)]

    def rank(group: Group) -> tuple[program.Work, int]:
        part = parallelize(parts[group.rank], plan, group)
        assert compact_layers(part) is not None
        decoder = Decoder(part, group)
        decoder.prepare()
        assert decoder.program is not None
        assert decoder.program.compact
        return pieces.work(decoder.program, 9), account.memory(part, group)[group.rank].parameters

    found = run_threads(rank, ranks)
    small = 2 * sum(t.shape[0] for t in plan.tensors.values() if len(t.shape) == 1)
    plain = program.works(plan, model, 1, 9, 2)
    for (work, held), said, before, size in zip(
        found, program.works(plan, model, 1, 9, 2, True), plain, compact.held(plan, model), strict=True
    ):
        assert work.read == pytest.approx(said.read, rel=2e-3, abs=small)
        assert held == pytest.approx(size, rel=2e-3)
        assert said.read < 0.9 * before.read
        assert said.operations == before.operations


def here(**changes: object) -> links.Machine:
    device = links.Device("x", "this machine", 3e10, 1e12, 8e9, "", True, (1.0, 1.0), False)
    by_program = replace(device, reads=((1e6, 4e10), (3e6, 3e10)), steps=((1e6, 1e-3),), attend=1e9, cores=2, compact=True)
    return links.Machine(device, links.LINKS["shm"], program=links.Machine(replace(by_program, **changes), links.LINKS["shm"]))


@functools.cache
def study(machine: links.Machine, ranks: int = 2, **question: object) -> Study:
    cfg = config("llama-2-7b")
    small = degrees.shortened(cfg)
    assert small is not None
    plan = degrees.stretch(derive(small, ranks), cfg.num_hidden_layers)
    return Study.of(cfg, plan, machine, Question(**{"context": 512} | question), others=(1, 2, 4))


def test_ranks_of_one_thread_read_and_hold_less() -> None:
    with_it, without = study(here()), study(here(compact=False))
    assert {n: row.compact for n, row in with_it.rows.items()} == {1: False, 2: True, 4: True}
    assert with_it.rows[1] == without.rows[1]
    for n in (2, 4):
        row, plain = with_it.rows[n], without.rows[n]
        assert 0.75 < row.decode.reading / plain.decode.reading < 0.76
        assert row.prefill == plain.prefill
        for held, before, size in zip(row.memory, plain.memory, cost.parameter_bytes(row.plan, 2), strict=True):
            assert held.opening == size == before.parameters
            assert held.parameters < 0.77 * size
            assert before.opening == 0
        assert row.largest_context > plain.largest_context
    assert study(here().plain).rows[2] == without.rows[2]
    assert not study(here(), dtype_bytes=4).rows[2].compact


def test_a_rank_that_cannot_be_opened_does_not_fit() -> None:
    """7B at tp=2 in bfloat16 are 6.7 GB while it is read, 5.1 GB afterwards."""
    small = study(here(), memory=7.0e9)
    held = small.row.memory[0]
    assert held.total < 0.9 * 7.0e9 < held.most == held.opening
    assert not small.row.fits(small.size)
    assert small.row.largest_context == 0
    assert memory.Memory(5, opening=10).fits(11.2)


def test_the_verdict_speaks_of_it_where_it_holds() -> None:
    def said(of: Study) -> str:
        return " ".join(s.text for s in verdict(of) if s.about == "engine")

    assert "in 12 bits" in said(study(here()))
    assert "12 bits" not in said(study(here(compact=False))) + said(study(here(), 1)) + said(study(links.machine("h100")))


@can
def test_a_preset_knows_it_and_an_older_one_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "READ", (2 << 20, 3 << 20, 4 << 20))
    file, page = tmp_path / "machine.json", tmp_path / "plan.html"
    assert main(["bench", "--calibrate", str(file), "--seconds", "0.05", "--dtype", "bfloat16", "--tp", "2"]) == 0
    found = links.machine(str(file)).program
    assert found is not None
    assert found.device.compact
    capsys.readouterr()
    asked = ["plan", "qwen2.5-0.5b", "--tp", str(max(2, found.device.cores)), "--device", str(file), "--dtype"]
    assert main([*asked, "bfloat16", "--full", "--html", str(page)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "weights of linear layers in 12 bits" in told
    assert "while it opens" in told
    assert "while it opens" in page.read_text()
    for dtype in ("float16", "float32"):
        assert main([*asked, dtype]) == 0
        assert "12 bits" not in capsys.readouterr().out
    file.write_text(file.read_text().replace('"compact"', '"gone"'), encoding="utf-8")
    assert main([*asked, "bfloat16"]) == 2, "a field that nobody knows"
    older = json.loads(file.read_text())
    for part in (older, older["program"]):
        del part["device"]["gone"]
    file.write_text(json.dumps(older), encoding="utf-8")
    assert main([*asked, "bfloat16"]) == 0
    assert "12 bits" not in capsys.readouterr().out


@can
def test_the_pace_is_that_of_compact_weights() -> None:
    weights = {kept: pace._weights(torch.bfloat16, 8 << 20, kept) for kept in (False, True)}
    assert weights[True][0].values.dtype is torch.uint8
    assert len(weights[True]) > len(weights[False])
    assert len({w.values.data_ptr() for w in weights[True]}) == len(weights[True])
    rows = torch.empty(pace.WIDTH, pace.WIDTH, dtype=torch.bfloat16)
    first = weights[True][1]
    assert first.beside is not None
    assert kernel.rows(first.values, first.beside, rows).float().std() == pytest.approx(pace.WIDTH**-0.5, rel=0.01)
