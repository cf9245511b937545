"""One f per tensor: when it is shared, when it must not be, and that nothing is remembered for long."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import torch

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel.state import REMEMBERED, Copies

from .hand_plans import hand_plan
from .splitting import ask_split, case, next_token_loss, whole


def on_two(task: Any) -> list[Any]:
    return run_threads(lambda group: task(group, Copies()), 2)


def test_the_same_tensor_has_one_f() -> None:
    def task(group: Group, copies: Copies) -> None:
        x = torch.ones(3, requires_grad=True)
        a, b = copies.copy(x, group, "q"), copies.copy(x, group, "k")
        assert a is b
        (a.sum() + 2 * b.sum()).backward()
        assert x.grad.tolist() == [6.0] * 3, "2 ranks of 1 + 2"
        assert {n: t.calls for (_, _, n), t in group.counters.sites.items()} == {"q.grad": 1}

    on_two(task)


def test_another_tensor_and_a_changed_one_have_their_own() -> None:
    def task(group: Group, copies: Copies) -> None:
        x = torch.ones(3, requires_grad=True) * 1
        before = copies.copy(x, group, "q")
        assert copies.copy(x.clone(), group, "q") is not before
        assert copies.copy(x, group, "q") is before
        x.add_(1)
        after = copies.copy(x, group, "q")
        assert after is not before
        assert after.tolist() == [2.0] * 3

    on_two(task)


def test_where_no_gradient_is_wanted_nothing_is_made() -> None:
    def task(group: Group, copies: Copies) -> None:
        frozen, x = torch.ones(3), torch.ones(3, requires_grad=True)
        assert copies.copy(frozen, group, "q") is frozen
        with torch.no_grad():
            assert copies.copy(x, group, "q") is x
        with torch.inference_mode():
            assert copies.copy(x + 1, group, "q").is_inference()
        assert copies.copy(x, group, "q") is not x, "what was seen without gradients must not be reused with them"

    on_two(task)


def test_little_is_remembered() -> None:
    def task(group: Group, copies: Copies) -> None:
        kept = [torch.ones(1, requires_grad=True) for _ in range(3 * REMEMBERED)]
        refs = [weakref.ref(copies.copy(x, group, "q")) for x in kept]
        gc.collect()
        assert sum(ref() is not None for ref in refs) == REMEMBERED
        copies.forget()
        gc.collect()
        assert not any(ref() is not None for ref in refs)

    on_two(task)


def test_nothing_is_kept_after_a_step() -> None:
    """Not even if the forward pass fails half-way."""
    at = whole(case("llama"))
    plan = hand_plan(at.config, 2)
    norm = "post_attention_layernorm"
    at_mlp = [replace(r, module=r.module.replace(norm, "mlp"), place="input", arg="x") if norm in r.module else r for r in plan.regions]

    def task(group: Group, model: Any) -> None:
        found = []
        model.model.layers[1].mlp.register_forward_hook(lambda *_: found.append(len(model.colrow.copies._known)))
        next_token_loss(model(at.ids).logits, at.ids).backward()
        assert found == [2], "two MLPs were remembered until here"
        assert model.colrow.copies._known == []
        try:
            model(torch.full((1, 2), 101))
        except IndexError:
            assert model.colrow.copies._known == []
        else:
            raise AssertionError("id 101 does not exist")

    ask_split(at, replace(plan, regions=tuple(at_mlp)), task)
