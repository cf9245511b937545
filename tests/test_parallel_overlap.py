"""The all-reduce of input gradients beside weight gradients: the same numbers, and really at the same time. Ranks as threads get a worker
here, as they have one over gloo."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from peft import LoraConfig

from colrow.comm import collectives, local
from colrow.comm.background import Worker, begin
from colrow.comm.collectives import all_reduce
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import RankError
from colrow.parallel.adapters import add_adapter
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_gradients
from colrow.parallel.overlap import Deferred
from colrow.planning.derive import derive
from colrow.train.settings import Settings

from . import tiny
from .splitting import TOLERANCE, case, next_token_loss, whole
from .test_train_equality import equal_on_ranks
from .test_train_run import SETTINGS, trained


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    original, shared = local.LocalTransport.__init__, {}

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.worker = shared.setdefault((self._board, self._world_rank), Worker())  # of a rank's groups, as over gloo

    monkeypatch.setattr(local.LocalTransport, "__init__", init)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each product that leaves its weight gradient to f."""
    seen: list[int] = []
    original = Deferred.leave

    def leave(self: Any, at: int, *rest: Any) -> None:
        seen.append(at)
        original(self, at, *rest)

    monkeypatch.setattr(Deferred, "leave", leave)
    return seen


@pytest.mark.parametrize(("family", "of_a_pass"), [("llama-bias", 10), ("gpt2", 4), ("llama-one-kv-head", 6), ("phi", 8), ("mixtral", 6)])
def test_five_steps_are_those_of_the_whole_model(family: str, of_a_pass: int, products: list[int]) -> None:
    """Linear and Conv1D, biases, parallel blocks, whole k and v, experts. The first pass sees which layers there are, five use it."""
    equal_on_ranks(family, 3, "off", torch.float64, TOLERANCE)
    assert len(products) == 5 * 3 * of_a_pass


@pytest.mark.parametrize(
    ("family", "mode"), [("llama-bias", "again"), ("gpt2", "again"), ("gpt2", "keep"), ("phi", "again"), ("opt", "again")]
)
def test_five_steps_on_slices_of_the_sequence(family: str, mode: str, products: list[int]) -> None:
    """Gathers of the sequence in f's place, and collectives and bytes as predicted; OPT's rows of all sequences are one dim."""
    equal_on_ranks(family, 3, mode, torch.float64, TOLERANCE)
    assert products


def test_the_all_reduce_runs_while_the_weight_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No all-reduce of an input's gradient is done before the weight gradients are: it would wait here until the test fails."""
    computed, original = threading.local(), Deferred.gradients

    class Late(Worker):
        def begin(self, work: Any) -> Any:
            self.ready = computed.ready = threading.Event()
            return super().begin(lambda: (self.ready.wait(20) or pytest.fail("the weight gradients waited for the all-reduce")) and work())

    def gradients(self: Any) -> Any:
        found = original(self)
        computed.ready.set()
        return found

    monkeypatch.setattr(Deferred, "gradients", gradients)
    at = whole(case("llama"))

    def task(group: Group) -> None:
        group.transport.worker = Late()  # type: ignore[attr-defined]
        model = parallelize(copies[group.rank], plan, group)
        for _ in range(2):
            next_token_loss(model(at.ids).logits, at.ids).backward()

    plan, copies = derive(at.config, 2), [copy.deepcopy(at.model) for _ in range(2)]
    run_threads(task, 2)


def test_sequences_are_gathered_beside_input_gradients_and_scattered_beside_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is done before the products beside it: of the first, until the second product behind the gather begins its own. And those
    of the second end when it has begun."""
    here = threading.local()
    multiplied, computed, begun = ([threading.Semaphore(0) for _ in range(2)] for _ in range(3))
    leave, gradients, all_gather, reduce_scatter = Deferred.leave, Deferred.gradients, collectives.all_gather, collectives.reduce_scatter
    at = whole(case("llama"))
    plan, copies = derive(at.config, 2), [copy.deepcopy(at.model) for _ in range(2)]

    def left(self: Any, *args: Any) -> None:
        leave(self, *args)
        if len(self._products) == 2:
            multiplied[here.rank].release()

    def found(self: Any) -> Any:
        assert begun[here.rank].acquire(timeout=20), "weight gradients before a reduce-scatter"
        out = gradients(self)
        computed[here.rank].release()
        return out

    def gathered(x: torch.Tensor, group: Group, name: str, *rest: Any) -> torch.Tensor:
        if name.endswith("layernorm.output.again") and not group.counters.phase:  # behind the last norm stands one product
            assert multiplied[group.rank].acquire(timeout=20), f"{name} before products"
        return all_gather(x, group, name, *rest)

    def scattered(x: torch.Tensor, group: Group, name: str, *rest: Any) -> torch.Tensor:
        if name.endswith(".grad"):
            begun[group.rank].release()
            assert computed[group.rank].acquire(timeout=20), f"{name} before weight gradients"
        return reduce_scatter(x, group, name, *rest)

    for module, name, patched in (
        (Deferred, "leave", left),
        (Deferred, "gradients", found),
        (collectives, "all_gather", gathered),
        (collectives, "reduce_scatter", scattered),
    ):
        monkeypatch.setattr(module, name, patched)

    def task(group: Group) -> None:
        here.rank = group.rank
        model = parallelize(copies[group.rank], plan, group, "again")
        for group.counters.phase in ("first", ""):  # in which nothing is known yet
            model(at.ids, labels=at.ids).loss.backward()

    run_threads(task, 2)


def test_collectives_keep_the_order_in_which_they_were_begun() -> None:
    """Also those of a part of the ranks, and one that is not begun but done."""

    def task(group: Group) -> list[str]:
        pair = group.sub((0, 1))
        group.counters.events = []

        def slowly(name: str, at: Group) -> torch.Tensor:
            time.sleep(0.05)
            return all_reduce(torch.ones(2), at, name)

        waits = [begin(lambda: slowly("first", group), group)]
        if pair is not None:
            waits.append(begin(lambda: slowly("second", pair), pair))
        all_reduce(torch.ones(2), group, "third")
        assert all(wait().sum() for wait in waits)
        return [event.name for event in group.counters.events]

    assert run_threads(task, 3) == [["first", "second", "third"], ["first", "second", "third"], ["first", "third"]]


def test_recomputed_layers_dropout_and_frozen_weights_beside_an_adapter(products: list[int]) -> None:
    plain, again = (run_threads(trained, 2, None, Settings(**vars(SETTINGS) | {"recompute": r, "steps": 3}))[0][1] for r in (False, True))
    assert products
    for name, p in plain.items():
        assert (p - again[name]).abs().max() < 1e-5, name
    products.clear()
    at = whole(case("llama"))

    def task(group: Group) -> dict[str, torch.Tensor]:
        model = parallelize(copies[group.rank], plan, group)
        add_adapter(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False), 0)
        for _ in range(2):
            model.zero_grad()
            next_token_loss(model(at.ids).logits, at.ids).backward()
        return whole_gradients(model)

    plan = derive(at.config, 2)
    copies = [copy.deepcopy(at.model) for _ in range(2)]
    found = run_threads(task, 2)[0]
    assert products == [], "what is frozen has no weight gradient"
    plan, copies = derive(at.config, 1), [copy.deepcopy(at.model)]
    for name, grad in run_threads(task, 1)[0].items():
        assert grad is None or (found[name] - grad).abs().max() <= TOLERANCE, name


def test_a_layer_that_is_used_twice_or_not_at_all() -> None:
    """In a pass that differs from the last: gate twice, up not at all. Gradients as without."""
    at = whole(case("llama"))
    ids = at.ids

    def task(group: Group, beside: bool) -> dict[str, torch.Tensor]:
        if not beside:
            group.transport.worker = None  # type: ignore[attr-defined]
        model: Any = parallelize(copy.deepcopy(at.model), plan, group)
        next_token_loss(model(ids).logits, ids).backward()
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.gate_proj(x))
        for _ in range(2):
            model.zero_grad()
            next_token_loss(model(ids).logits, ids).backward()
        loss = next_token_loss(model(ids).logits, ids)
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plan = derive(at.config, 2)
    expected, found = run_threads(task, 2, False), run_threads(task, 2, True)
    for one, other in zip(expected, found, strict=True):
        for name, grad in one.items():
            assert (grad is None) == (other[name] is None), name
            assert grad is None or (grad - other[name]).abs().max() <= TOLERANCE, name


def test_under_autocast_products_keep_their_gradients(products: list[int]) -> None:
    def task(group: Group) -> None:
        model: Any = parallelize(tiny.whole(config, torch.float32), plan, group)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token_loss(model(ids).logits, ids)
            loss.backward()

    config = tiny.config("llama")
    plan, ids = derive(config, 2), tiny.ids(config)
    run_threads(task, 2)
    assert products == []


def test_ranks_that_disagree_are_named_where_they_wait() -> None:
    def task(group: Group) -> None:
        begin(lambda: all_reduce(torch.ones(2), group, f"site {group.rank}"), group)()

    with pytest.raises(RankError, match="site 0.*site 1|site 1.*site 0"):
        run_threads(task, 2)


def test_without_a_worker_it_is_done_at_once() -> None:
    def task(group: Group) -> torch.Tensor:
        group.transport.worker = None  # type: ignore[attr-defined]
        x = torch.ones(2)
        wait = begin(lambda: all_reduce(x, group, "site", inplace=True), group)
        assert x.tolist() == [2, 2]
        return wait()

    assert [x.tolist() for x in run_threads(task, 2)] == [[2, 2], [2, 2]]
