"""Training in a split model is training the whole one: norms, clipping, accumulation, master weights, replicas (reports O-32, O-33)."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.build import empty, parallelize, split
from colrow.parallel.collect import whole_gradients, whole_parameters
from colrow.parallel.head import loss_terms
from colrow.planning.derive import derive
from colrow.proof.precision import Float64
from colrow.train import gradients
from colrow.train.gradients import clip_grad_norm, grad_norm, trainable
from colrow.train.master import MasterWeights
from colrow.train.step import backward, check_same_data, count_tokens

from . import tiny
from .families import FAMILIES, TRANSLATORS
from .splitting import TOLERANCE, Whole, ask_split, case, next_token_loss, own, whole


def whole_clipped(at: Whole, kind: float) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Norm, the limit (half of it) and clipped gradients of the unsplit model, by torch's own function."""
    model = copy.deepcopy(at.model)
    next_token_loss(model(at.ids).logits, at.ids).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], kind))
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 2, kind)
    return norm, norm / 2, {name: p.grad for name, p in model.named_parameters()}


def split_clipped(at: Whole, ranks: int, kind: float, limit: float) -> list[tuple[float, dict[str, torch.Tensor]]]:
    def task(group: Group, model: Any) -> tuple[float, dict[str, torch.Tensor]]:
        next_token_loss(model(at.ids).logits, at.ids).backward()
        return float(clip_grad_norm(model, limit, kind)), whole_gradients(model)

    return ask_split(at, derive(at.config, ranks), task)


@pytest.mark.parametrize("kind", [2.0, math.inf])
@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_o32_the_norm_does_not_depend_on_the_ranks(family: str, kind: float, ranks: int) -> None:
    """Copied KV heads (9 and 3 on 2 and 4 ranks), tied embeddings, whole norms and row biases: each element is counted once."""
    at = whole(case(family))
    norm, limit, clipped = whole_clipped(at, kind)
    results = split_clipped(at, ranks, kind, limit)
    assert len({found for found, _ in results}) == 1, "the same bits on every rank"
    for found, grads in results:
        assert abs(found - norm) <= TOLERANCE * norm
        for name, grad in clipped.items():
            assert (grads[name] - grad).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("fault", ["whole tensors on every rank", "copies on every holder"])
def test_o32_counting_a_replica_twice_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gradients.owned

    def wrong(tensor: torch.Tensor, partition: Any, rank: int) -> Any:
        if partition.dim is None:
            return original(tensor, partition, 0 if fault.startswith("whole") else rank)
        return iter([tensor]) if fault.startswith("copies") else original(tensor, partition, rank)

    at = whole(case("qwen2"))
    norm, limit, _ = whole_clipped(at, 2.0)
    monkeypatch.setattr(gradients, "owned", wrong)
    found = split_clipped(at, 2, 2.0, limit)[0][0]
    assert found > norm * (1 + 1e-4)


def test_norms_of_another_kind_are_refused() -> None:
    at = whole(case("llama"))
    with pytest.raises(UserError, match="above 0"):
        ask_split(at, derive(at.config, 2), lambda group, model: clip_grad_norm(model, 1.0, 0.0))


def test_a_parameter_that_the_plan_does_not_know_is_named() -> None:
    def task(group: Group, model: Any) -> None:
        model.model.norm.extra = torch.nn.Parameter(torch.zeros(3))
        trainable(model)

    at = whole(case("llama"))
    with pytest.raises(UserError, match=r"model\.norm\.extra"):
        ask_split(at, derive(at.config, 2), task)


def rows(at: Whole, lengths: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """One padded row for each number of tokens; padding is not attended to and not a label."""
    draw, width, out = torch.Generator().manual_seed(5), max(lengths) + 1, []
    for length in lengths:  # `length` labels are predicted: one token more is read
        ids = torch.randint(3, at.config.vocab_size, (1, width), generator=draw)
        mask = (torch.arange(width) <= length).long()[None]
        out.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return out


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@pytest.mark.parametrize("cut", [(4,), (1, 1, 1, 1), (3, 1), (1, 2, 1)])
def test_o33_a_step_does_not_depend_on_how_the_batch_is_cut(cut: tuple[int, ...]) -> None:
    """Lengths 3, 11, 7 and 1: the mean of means would be another number. A row without any label counts nothing."""
    at = whole(case("llama-tied"))
    singles = [*rows(at, (3, 11, 7, 1)), {k: v.clone() for k, v in rows(at, (11,))[0].items()}]
    singles[-1]["labels"].fill_(-100)
    batch = joined(singles[:4])
    model = copy.deepcopy(at.model)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    assert count_tokens(batch) == 22

    def task(group: Group, split: Any) -> tuple[float, dict[str, torch.Tensor]]:
        ends = [sum(cut[: i + 1]) for i in range(len(cut))]
        micro = [joined(singles[end - size : end]) for end, size in zip(ends, cut, strict=True)]
        return backward(split, [*micro, singles[-1]]), whole_gradients(split)

    for found, grads in ask_split(at, derive(at.config, 2), task):
        assert abs(found - float(loss.detach())) <= TOLERANCE
        for name, parameter in model.named_parameters():
            assert (grads[name] - parameter.grad).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "gemma2"])
def test_label_smoothing_and_z_loss_are_of_the_whole_vocabulary(family: str, ranks: int) -> None:
    """With the head and the loss in one, and (Gemma 2 caps its logits) from logits."""
    config = FAMILIES[family]() if family in FAMILIES else tiny.config(family)
    model, ids = tiny.whole(config), tiny.ids(config, batch=2, length=7)
    at = copy.deepcopy(model)
    with Float64():
        logits = at(ids).logits[:, :-1].flatten(0, 1)
        expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1) + 0.3 * logits.logsumexp(-1).square().mean()
        expected.backward()
    batches = [{"input_ids": row[None], "labels": row[None]} for row in ids]

    def task(group: Group) -> tuple[float, float, dict[str, torch.Tensor]]:
        part = parallelize(copies[group.rank], plan, group)
        with Float64():
            with loss_terms(part, label_smoothing=0.1, z_loss=0.3):
                found = backward(part, batches)
            grads = {name: grad.clone() for name, grad in whole_gradients(part).items()}
            return found, backward(part, batches), grads

    plan, copies = derive(config, ranks), [copy.deepcopy(model) for _ in range(ranks)]
    for found, plain, grads in run_threads(task, ranks):
        assert abs(found - float(expected.detach())) <= TOLERANCE
        assert plain < found, "only within"
        for name, p in at.named_parameters():
            assert (grads[name] - p.grad).abs().max() <= TOLERANCE, name


def test_losses_that_take_no_terms_are_refused() -> None:
    config = TRANSLATORS["t5"]()
    plan = derive(config, 2)

    def task(group: Group) -> None:
        with loss_terms(split(empty(config, torch.float32), plan, group), z_loss=1e-4):
            pass

    with pytest.raises(UserError, match="loss is the usual one of their logits, got T5"):
        run_threads(task, 2)


def test_o33_the_unsplit_model_is_trained_by_the_same_code() -> None:
    at = whole(case("llama"))
    singles = rows(at, (3, 11, 7, 1))

    def task(group: Group, model: Any) -> float:
        return backward(model.float(), singles)

    one, two = (ask_split(at, derive(at.config, ranks), task)[0] for ranks in (1, 2))
    assert abs(one - two) < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_five_steps_equal_the_whole_models_and_replicas_have_the_same_bits(family: str) -> None:
    at = whole(case(family))
    model = copy.deepcopy(at.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        next_token_loss(model(at.ids).logits, at.ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    def task(group: Group, split: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        mine = torch.optim.AdamW(split.parameters(), lr=1e-2)
        for _ in range(5):
            next_token_loss(split(at.ids).logits, at.ids).backward()
            clip_grad_norm(split, 0.5)
            mine.step()
            mine.zero_grad()
        states = {f"{n} {k}": mine.state[p][k] for n, p in split.named_parameters() for k in ("exp_avg", "exp_avg_sq")}
        return whole_parameters(split), own(split) | states

    plan = derive(at.config, 2)
    results = ask_split(at, plan, task)
    for name, parameter in model.named_parameters():
        assert (results[0][0][name] - parameter).abs().max() <= TOLERANCE, name
    for name, tensor in results[0][1].items():
        partition = plan.tensor(name.split()[0]).partition
        other = results[1][1][name]
        if partition.is_whole:
            assert torch.equal(tensor, other), name
        for segment in partition.shared():
            at_rank = [partition.local_offset(rank, segment.start) for rank in range(2)]
            first, second = (
                t.narrow(partition.dim, a, segment.stop - segment.start) for t, a in zip((tensor, other), at_rank, strict=True)
            )
            assert torch.equal(first, second), name


def test_master_weights_follow_small_steps_that_bfloat16_would_lose() -> None:
    """200 steps of 1e-5 each on weights of about 0.05 and 1: bfloat16 alone stays where it was."""
    at = whole(case("llama"))

    def task(group: Group, model: Any, masters: bool) -> dict[str, torch.Tensor]:
        model.to(torch.bfloat16)
        held = MasterWeights(model).parameters if masters else trainable(model)
        optimizer = torch.optim.SGD(held.values(), lr=1.0)
        for _ in range(200):
            for parameter in model.parameters():  # backward of a loss whose gradient is 1e-5 everywhere
                (parameter.sum() * 1e-5).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().float() for name, p in held.items()}

    plan = derive(at.config, 2)
    with_masters = ask_split(at, plan, lambda g, m: task(g, m, True))[0]
    without = ask_split(at, plan, lambda g, m: task(g, m, False))[0]
    start = at.model.model.norm.weight.detach().to(torch.bfloat16).float()
    assert torch.allclose(with_masters["model.norm.weight"], start - 200 * 1e-5, atol=1e-5)
    assert (without["model.norm.weight"] - start).abs().max() < 1e-5


def test_master_weights_accumulate_clip_and_write_back() -> None:
    """bfloat16 compute, two micro-batches: float32 gradients, the model's freed, the model's weights the rounded masters."""
    at = whole(case("llama-tied"))
    halves = [{"input_ids": at.ids[i : i + 1], "labels": at.ids[i : i + 1]} for i in range(2)]

    def task(group: Group, model: Any) -> tuple[float, float]:
        model.to(torch.bfloat16)
        master = MasterWeights(model)
        optimizer = torch.optim.AdamW(master.parameters.values(), lr=1e-3)
        first = backward(model, halves)
        assert all(p.grad is None for p in model.parameters())
        assert all(p.grad.dtype is torch.float32 for p in master.parameters.values())
        norm = float(grad_norm(master.parameters, model.colrow.plan, group))
        optimizer.step()
        master.write_back()
        for name, p in master.parameters.items():
            assert torch.equal(model.get_parameter(name), p.to(torch.bfloat16)), name
        optimizer.zero_grad()
        assert backward(model, halves) < first
        return first, norm

    results = ask_split(at, derive(at.config, 2), task)
    assert results[0] == results[1]
    reference = copy.deepcopy(at.model)
    next_token_loss(reference(at.ids).logits, at.ids).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]))
    assert abs(results[0][1] - norm) < 0.05 * norm


def test_ranks_with_other_data_are_named() -> None:
    ids = torch.arange(6)[None]

    def task(group: Group, where: int) -> None:
        mine = ids + (1 if group.rank == where else 0)
        check_same_data([{"input_ids": ids}, {"input_ids": ids, "labels": mine}], group)

    run_threads(task, 3, 7)
    with pytest.raises(UserError, match="labels of micro-batch 1 differs between rank 0 and rank 2"):
        run_threads(task, 3, 2)


def test_a_batch_without_labels_is_refused() -> None:
    at = whole(case("llama"))
    with pytest.raises(UserError, match="labels"):
        ask_split(at, derive(at.config, 2), lambda group, model: backward(model, [{"input_ids": at.ids}]))


def test_the_split_helper_is_not_confused_by_whole_copies() -> None:
    """parallelize on one rank leaves the model whole; the same functions work there."""
    at = whole(case("llama"))
    model = copy.deepcopy(at.model)
    run_threads(lambda group: parallelize(model, derive(at.config, 1), group), 1)
    next_token_loss(model(at.ids).logits, at.ids).backward()
    assert float(clip_grad_norm(model, 1e9)) > 0
