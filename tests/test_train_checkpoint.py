"""A run that is saved at a ranks and resumed at b is the run that was never interrupted; exported files are the unsplit model's bytes."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from colrow.checkpoint.rank_files import complete, held, open_checkpoint
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel import build
from colrow.parallel.collect import whole_parameters
from colrow.partition import Partition
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.train import checkpoint
from colrow.train.checkpoint import resume, save, unfinished
from colrow.train.events import EventFile
from colrow.train.export import export
from colrow.train.gradients import clip_grad_norm, trainable
from colrow.train.journal import Journal
from colrow.train.master import MasterWeights

from . import families, tiny
from .splitting import TOLERANCE, ask_split, case, next_token_loss, whole

AT = case("qwen2", tie_word_embeddings=True)
RANKS = (1, 2, 3, 4)
BEFORE, AFTER = 2, 3  # steps


@functools.cache
def plan_for(ranks: int) -> Plan:
    return derive(whole(AT).config, ranks)


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        next_token_loss(model(whole(AT).ids).logits, whole(AT).ids).backward()
        if hasattr(model, "colrow"):
            clip_grad_norm(model, 0.5)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model).values() if hasattr(model, "colrow") else model.parameters(), lr=lr)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, torch.Tensor]:
    model = copy.deepcopy(whole(AT).model)
    steps(model, adamw(model), BEFORE + AFTER)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A checkpoint after BEFORE steps at each number of ranks."""
    root = tmp_path_factory.mktemp("saved")

    def task(group: Group, model: Any) -> Path:
        optimizer = adamw(model)
        steps(model, optimizer, BEFORE)
        return save(root / str(group.size), BEFORE, model, trainable(model), optimizer, {"tokens": 77})

    return {ranks: ask_split(whole(AT), plan_for(ranks), task)[0] for ranks in RANKS}


@pytest.mark.parametrize("b", RANKS)
@pytest.mark.parametrize("a", RANKS)
def test_saved_at_a_resumed_at_b(a: int, b: int, saved: dict[int, Path], uninterrupted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    def task(group: Group, model: Any) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(9.0)  # nothing may be left of what was there
        optimizer = adamw(model, lr=123.0)
        assert resume(open_checkpoint(saved[a]), model, trainable(model), optimizer) == {"tokens": 77}
        save(tmp_path / "again", BEFORE, model, trainable(model), optimizer)
        steps(model, optimizer, AFTER)
        return whole_parameters(model)

    for result in ask_split(whole(AT), plan_for(b), task):
        for name, expected in uninterrupted.items():
            assert (result[name] - expected).abs().max() <= TOLERANCE, name
    first, second = export(saved[a], tmp_path / "first"), export(tmp_path / "again", tmp_path / "second")
    assert contents(first) == contents(second), "what was saved at a and again at b has the same bytes"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "llama-tied"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_exported_files_are_those_of_the_whole_model(family: str, ranks: int, tmp_path: Path) -> None:
    """Uneven vocabulary (101), copied KV heads, fused q|k|v: no padding, no copies, no names of colrow; several shards too."""
    at = whole(case(family))
    ask_split(at, derive(at.config, ranks), lambda group, model: save(tmp_path / "c", 1, model.bfloat16(), trainable(model), None))
    reference = copy.deepcopy(at.model).bfloat16()
    for name, size in (("one", "50GB"), ("several", "20KB")):
        export(tmp_path / "c", tmp_path / name, size)
        reference.save_pretrained(tmp_path / f"{name} whole", max_shard_size=size)
        assert contents(tmp_path / name) == contents(tmp_path / f"{name} whole")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "several", dtype="auto")
    for name, p in reference.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p), name


def test_buffers_that_files_hold_are_kept(tmp_path: Path) -> None:
    """DeepSeek-V3's correction of its routers, which its initializer would make 0: saved at 2, read at 3, exported."""
    config = families.FAMILIES["deepseek-v3"]()
    model: Any = tiny.whole(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).normal_()

    def write(group: Group) -> None:
        part: Any = build.parallelize(copy.deepcopy(model), derive(config, group.size), group)
        save(tmp_path / str(group.size), 1, part, trainable(part), None)

    def read(group: Group) -> None:
        part: Any = build.parallelize(copy.deepcopy(model), derive(config, group.size), group)
        part.get_buffer(name).zero_()
        resume(open_checkpoint(tmp_path / "2"), part, trainable(part), None)
        assert torch.equal(part.get_buffer(name), model.get_buffer(name))

    run_threads(write, 2)
    run_threads(read, 3)
    export(tmp_path / "2", tmp_path / "exported")
    model.save_pretrained(tmp_path / "whole")
    assert contents(tmp_path / "exported") == contents(tmp_path / "whole")


def test_master_weights_come_back_exactly(tmp_path: Path) -> None:
    """bfloat16 model, float32 masters, momentum: saved at 2, resumed at 3. The masters are not rounded."""
    at = whole(AT)

    def write(group: Group, model: Any) -> dict[str, torch.Tensor]:
        master = MasterWeights(model.bfloat16())
        optimizer = torch.optim.SGD(master.parameters.values(), lr=0.1, momentum=0.9)
        next_token_loss(model(at.ids).logits.float(), at.ids).backward()
        optimizer.step()
        master.write_back()
        save(tmp_path, 1, model, master.parameters, optimizer)
        return whole_parameters(model)

    def read(group: Group, model: Any) -> dict[str, torch.Tensor]:
        master = MasterWeights(model.bfloat16())
        optimizer = torch.optim.SGD(master.parameters.values(), lr=0.1, momentum=0.9)
        saved = open_checkpoint(tmp_path)
        resume(saved, model, master.parameters, optimizer)
        for name, p in master.parameters.items():
            entry = model.colrow.plan.tensors[name]
            expected = saved.source("master").read(name, None, ())
            assert torch.equal(p, entry.partition.split(expected, group.rank))
            assert torch.equal(model.get_parameter(name), p.bfloat16())
            assert not torch.equal(p, p.bfloat16().float())
            assert optimizer.state[p]["momentum_buffer"].shape == p.shape
        return whole_parameters(model)

    first, second = ask_split(at, plan_for(2), write)[0], ask_split(at, plan_for(3), read)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_save_that_is_not_finished_is_not_seen(saved: dict[int, Path], tmp_path: Path) -> None:
    def fails(group: Group, model: Any) -> None:
        optimizer = adamw(model)
        save(tmp_path, 1, model, trainable(model), optimizer)

        def stop(path: Path) -> None:
            raise RuntimeError("the machine stops")

        save(tmp_path, 2, model, trainable(model), optimizer, beside=stop)

    with pytest.raises(RuntimeError, match="the machine stops"):
        ask_split(whole(AT), plan_for(2), fails)
    assert [p.name for p in complete(tmp_path)] == ["step-00000001"]
    assert len(unfinished(tmp_path)) == 1
    ask_split(whole(AT), plan_for(2), lambda g, m: [save(tmp_path, n, m, trainable(m), None) for n in (3, 4, 5)])
    assert [p.name for p in complete(tmp_path)] == ["step-00000004", "step-00000005"], "the newest two are kept"
    assert not unfinished(tmp_path)


@pytest.mark.process
def test_killed_twenty_times_while_saving(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kill_saves", str(tmp_path), "20"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0, "no kill came in the middle of a save"


def test_a_full_disk_is_one_line_on_every_rank_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot write its file: all say so, the last checkpoint stays, and what was begun is removed."""
    room = checkpoint.save_file

    def full(tensors: Any, path: Path) -> None:
        if path.parent.name.endswith("2") and path.name == "rank-1-of-2.safetensors":
            path.write_bytes(b"as far as it went")
            raise OSError(28, "No space left on device")
        room(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)

    def task(group: Group, model: Any) -> None:
        save(tmp_path, 1, model, trainable(model), None)
        with pytest.raises(UserError, match=r"could not be written by rank 1 .*No space left.*goes on from there"):
            save(tmp_path, 2, model, trainable(model), None)

    ask_split(whole(AT), plan_for(2), task)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Exception("No space left on device (os error 28)")])
def test_a_disk_that_is_full_for_what_rank_0_adds_leaves_nothing(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's files beside a checkpoint (tokenizers raise a bare Exception), the exported model, the log."""

    def full(*_: Any, **__: Any) -> None:
        raise error

    def task(group: Group, model: Any) -> None:
        save(tmp_path / "run", 1, model, trainable(model), None)
        with pytest.raises(UserError, match=r"checkpoint could not be written .*No space left.*goes on from there"):
            save(tmp_path / "run", 2, model, trainable(model), None, beside=full)

    ask_split(whole(AT), plan_for(2), task)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000001"]
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(UserError, match=r"model could not be written .*No space left"):
        export(tmp_path / "run", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    monkeypatch.setattr(EventFile, "_append", full)
    with pytest.raises(UserError, match=r"log of the run could not be written .*No space left"):
        Journal(tmp_path / "log", "a model")


def test_an_error_that_is_not_the_disks_stays_what_it_is(tmp_path: Path) -> None:
    def wrong(_: Path) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        ask_split(whole(AT), plan_for(1), lambda g, m: save(tmp_path, 1, m, trainable(m), None, beside=wrong))


def test_what_cannot_be_resumed_is_named(saved: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no training checkpoint"):
        open_checkpoint(tmp_path)

    def other_optimizer(group: Group, model: Any) -> None:
        resume(open_checkpoint(saved[2]), model, trainable(model), torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(UserError, match="another optimizer, got AdamW"):
        ask_split(whole(AT), plan_for(2), other_optimizer)
    other = whole(case("llama"))
    with pytest.raises(UserError, match="another model"):
        ask_split(other, derive(other.config, 2), lambda g, m: resume(open_checkpoint(saved[2]), m, trainable(m), None))
    with pytest.raises(UserError, match="there already"):
        export(saved[2], tmp_path)
    adafactor = lambda g, m: (opt := torch.optim.Adafactor(m.parameters()), steps(m, opt, 1), save(tmp_path, 1, m, trainable(m), opt))  # noqa: E731
    with pytest.raises(UserError, match="another shape than its parameter"):
        ask_split(whole(AT), plan_for(2), adafactor)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "state.json").write_text(json.dumps({"ranks": 2, "format": 99}))
    with pytest.raises(UserError, match="another format, got 99"):
        open_checkpoint(damaged)


def test_ranges_are_found_where_they_lie() -> None:
    cut = Partition(0, (((0, 4), (8, 10)), ((2, 8),)))
    assert list(held(cut, [(0, 10)])) == [(0, (0, 2)), (0, (2, 4)), (1, (2, 6)), (0, (4, 6))]
    assert list(held(cut, [(3, 5), (9, 10)])) == [(0, (3, 4)), (1, (2, 3)), (0, (5, 6))]
