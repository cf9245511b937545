"""The library's functions on a small saved model: plan, load, parallelize, init, spawn; rank 0's errors reach every rank."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import colrow
from colrow import api
from colrow.comm.decide import on_rank_0
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.account import Stages
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("model")
        tiny.whole(tiny.config("qwen2"), attention="sdpa").save_pretrained(folder)
        yield str(folder)


def test_a_plan_from_a_name_or_a_config(model: str) -> None:
    plan = colrow.plan(model, tp=2)
    assert plan == colrow.plan(tiny.config("qwen2", dtype="float64", architectures=["Qwen2ForCausalLM"]), tp=2)
    assert "down_proj" in str(plan)
    assert "down_proj" in plan.why("model.layers.0.mlp.down_proj.weight")
    assert colrow.plan(model, tp=2, split=(3, 1)).weights == (3.0, 1.0)
    for wrong in ({"tp": 0}, {"tp": 2, "split": (1,)}, {"tp": 2, "split": (-1, 2)}, {"tp": True}):
        with pytest.raises(colrow.UserError):
            colrow.plan(model, **wrong)


@pytest.mark.parametrize("split", [None, (3.0, 1.0)], ids=str)
def test_load_gives_the_whole_models_logits(model: str, split: tuple[float, ...] | None) -> None:
    config = tiny.config("qwen2")
    ids = tiny.ids(config)
    expected = tiny.whole(config, attention="sdpa")(ids).logits

    def rank(group: Group) -> tuple[torch.Tensor, list[str], str]:
        stages = Stages()
        part = api.load(model, group, split=split, stages=stages)
        assert not part.training
        return part(ids).logits.detach(), list(stages.seconds), stages.results["gate"]

    for logits, stages, gate in run_threads(rank, 2):
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
        assert stages == ["imports", "find", "plan", "gate", "load"]
        assert "passed" in gate


def test_the_files_dtype_unless_another_is_wished(model: str) -> None:
    assert next(api.load(model, single(), gate=False).parameters()).dtype is torch.float64
    assert next(api.load(model, single(), dtype="bfloat16", gate=False).parameters()).dtype is torch.bfloat16
    with pytest.raises(colrow.UserError, match="no such dtype"):
        api.load(model, single(), dtype="float12")


def test_parallelize_a_model_in_memory() -> None:
    config = tiny.config("llama")
    whole = tiny.whole(config, attention="sdpa")
    ids = tiny.ids(config)

    def rank(group: Group) -> torch.Tensor:
        return colrow.parallelize(copy.deepcopy(whole), group, gate=False)(ids).logits.detach()

    for logits in run_threads(rank, 3):
        torch.testing.assert_close(logits, whole(ids).logits, atol=1e-10, rtol=0)


def test_a_plan_for_other_ranks_is_refused_on_every_rank(model: str) -> None:
    plan, raised = colrow.plan(model, tp=3), []

    def rank(group: Group) -> None:
        try:
            api.load(model, group, plan=plan)
        except colrow.UserError as error:
            raised.append(str(error))

    run_threads(rank, 2)
    assert len(raised) == 2
    assert all("the plan is for 3 ranks" in text for text in raised)


def test_an_engine_needs_a_tokenizer_and_says_so_everywhere(model: str) -> None:
    raised = []

    def rank(group: Group) -> None:
        try:
            api.open_engine(model, group, gate=False)
        except colrow.UserError as error:
            raised.append(str(error))

    run_threads(rank, 2)
    assert len(raised) == 2
    assert all("tokenizer" in text for text in raised)


def test_rank_0_decides_and_its_mistakes_are_everyones() -> None:
    def rank(group: Group) -> tuple[int, str]:
        value = on_rank_0(lambda: group.rank + 40, group, "test.value")
        try:
            on_rank_0(lambda: 1 // 0 if group.rank else _refuse(), group, "test.error")
        except colrow.UserError as error:
            return value, str(error)
        return value, ""

    assert run_threads(rank, 3) == [(40, "no, got 7; try: 8")] * 3


def _refuse() -> int:
    raise colrow.UserError("no", 7, "8")


def test_init_alone_and_with_a_wrong_degree() -> None:
    with colrow.init() as group:
        assert (group.rank, group.size) == (0, 1)
    with pytest.raises(colrow.UserError, match=r"torchrun --nproc-per-node 2"), colrow.init(tp=2):
        pass


def _spawned(group: Group, folder: str) -> list[int]:
    ids = torch.tensor([[5, 6, 7]])
    return api.load(folder, group, gate=False).generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()


@pytest.mark.process
def test_spawn_runs_transformers_generate_on_two_processes(model: str) -> None:
    whole = tiny.whole(tiny.config("qwen2"), attention="sdpa")
    expected = whole.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()
    assert colrow.spawn(_spawned, 2, model) == [expected] * 2
    assert Path(model).is_dir()


def test_a_dtype_may_be_torchs() -> None:
    assert api.the_dtype("float64") is api.the_dtype(torch.float64) is torch.float64
    with pytest.raises(colrow.UserError, match="no such dtype, got int64"):
        api.the_dtype(torch.int64)
