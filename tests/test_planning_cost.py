"""The accounting: figures known in advance, formulas, and counts of real collectives to the byte."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from colrow.comm import launch
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.parallel.head import sharded_logits
from colrow.planning import cost, degrees, sequence, wire
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.planning.shapes import config

from .cost_ranks import ask_transport
from .splitting import Whole, ask_split, case, whole

H100_LINK = 450e9  # bytes per second and direction


@functools.cache
def plan70(ranks: int) -> Plan:
    return derive(config("llama-3-70b"), ranks)


def test_llama_70b_decoding_on_four_ranks() -> None:
    found = cost.predict(plan70(4), 1, 2048, "decode", 2)
    blocks = [p for p in found if p.section == "blocks"]
    assert {(p.op, p.logical_bytes) for p in blocks} == {("all_reduce", 16_384)}
    every = cost.total(found, "ring", "blocks")
    assert (every.calls, every.logical_bytes, every.sent) == (160, 2_621_440, 3_932_160)
    assert every.sent * 50 == 196_608_000
    assert round(100 * every.sent * 50 / H100_LINK, 2) == 0.04
    assert [(p.op, p.logical_bytes) for p in found if p.section == "vocabulary"] == [("all_reduce", 16_384), ("all_gather", 256_512)]


def test_batch_32() -> None:
    found = cost.predict(plan70(4), 32, 2048, "decode", 2)
    assert {p.logical_bytes for p in found if p.section == "blocks"} == {524_288}


@pytest.mark.parametrize("seq", [1, 128, 8192])
def test_decoding_moves_the_same_at_any_length(seq: int) -> None:
    plan = derive(LlamaConfig(hidden_size=4096, num_hidden_layers=32, intermediate_size=11008, num_attention_heads=32, vocab_size=32000), 4)
    assert cost.total(cost.predict(plan, 1, seq, "decode", 2), section="blocks").logical_bytes == 524_288


def test_what_the_algorithms_send() -> None:
    sent = {a: wire.moved(a, "all_reduce", 16_384, 0, 4, unit=2) for a in wire.SENT}
    assert sent == {"ring": 24_576, "one-shot": 49_152, "two-shot": 24_576, "tree": 24_576}
    assert [wire.moved("ring", "all_gather", 100, r, 3, (50, 30, 20)) for r in range(3)] == [70, 80, 50]
    assert [wire.moved("ring", "reduce_scatter", 100, r, 3, (50, 30, 20)) for r in range(3)] == [50, 70, 80]
    assert [wire.steps(a, "all_reduce", 8) for a in wire.SENT] == [14, 1, 2, 6]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("numel", [1, 7, 96, 1000])
def test_a_ring_sends_what_the_formula_says(ranks: int, numel: int) -> None:
    """Uneven parts: the sum over ranks is 2(n-1)·B exactly, for all-gather and reduce-scatter half of it."""
    for algorithm in ("ring", "two-shot"):
        assert sum(wire.moved(algorithm, "all_reduce", 4 * numel, r, ranks, unit=4) for r in range(ranks)) == 2 * (ranks - 1) * 4 * numel
    for op in ("all_gather", "reduce_scatter"):
        assert sum(wire.moved("ring", op, 4 * numel, r, ranks, unit=4) for r in range(ranks)) == (ranks - 1) * 4 * numel


def counted(at: Whole, plan: Plan, phase: cost.Phase) -> list[dict[tuple[str, str], tuple[int, int, int]]]:
    """(op, name) -> calls, logical bytes, moved bytes, on every rank."""

    def task(group: Group, model: Any) -> dict[tuple[str, str], tuple[int, int, int]]:
        group.counters.reset()
        group.counters.phase = "train_forward"
        if phase == "prefill":
            with torch.no_grad():
                model(at.ids)
        else:
            with sharded_logits(model):
                loss = model(at.ids, labels=at.ids).loss
            group.counters.phase = "train_backward"
            loss.backward()
        wanted = phase if phase == "train_backward" else "train_forward"
        sites = group.counters.sites.items()
        return {(op, name): (t.calls, t.logical_bytes, t.moved_bytes) for (p, op, name), t in sites if p == wanted}

    return ask_split(at, plan, task)


@pytest.mark.parametrize("phase", ["prefill", "train_forward", "train_backward"])
@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("llama-tied", 3), ("qwen2", 5), ("gpt2", 4)])
def test_threads_count_what_is_predicted(family: str, ranks: int, phase: cost.Phase) -> None:
    at = whole(case(family))
    plan = derive(at.config, ranks)
    batch, seq = at.ids.shape
    for rank, found in enumerate(counted(at, plan, phase)):
        expected: dict[tuple[str, str], tuple[int, int, int]] = {}
        for p in cost.predict(plan, batch, seq, phase, 8):
            if rank in p.ranks:
                calls, size, moved = expected.get((p.op, p.name), (0, 0, 0))
                more = p.moved_bytes("threads", p.ranks.index(rank))
                expected[p.op, p.name] = calls + p.calls, size + p.logical_bytes, moved + more
        assert found == expected


def test_sequence_parallelism_moves_the_same_on_a_ring() -> None:
    """f and g become pairs of half the volume; only what is gathered again comes on top."""
    plan = plan70(4)
    keep = sequence.cut(plan, again=False)
    assert keep is not None
    for phase in ("train_forward", "train_backward"):
        plain = cost.total(cost.predict(plan, 1, 4096, phase), section="blocks")
        kept = sequence.predict(plan, keep, 1, 4096, phase)
        activations = [p for p in kept if p.section == "blocks" and not p.name.endswith(("weight.grad", "input.sequence.grad"))]
        assert cost.total(activations).sent == plain.sent
        assert {p.op for p in activations} == {"all_gather", "reduce_scatter"}
        assert len(activations) == 2 * plain.calls
    again = [p for p in sequence.predict(plan, replace(keep, again=True), 1, 4096, "train_backward") if p.name.endswith(".again")]
    assert len(again) == 2 * 80 + 1


def test_full_recomputation_repeats_one_all_reduce_a_block() -> None:
    found = cost.recomputed(plan70(4), 1, 4096)
    assert len(found) == 80
    assert all(p.name.endswith("self_attn.o_proj.output.again") for p in found)


def test_fsdp_moves_three_times_the_weights() -> None:
    plan = plan70(4)
    size = sum(cost.parameter_bytes(derive(config("llama-3-70b"), 1), 2))
    found = cost.fully_sharded(plan)
    assert sum(p.logical_bytes for p in found) == 3 * size
    assert len(found) == 3 * 81


def check_transport(kind: wire.Algorithm, results: list[list[tuple[str, int, int, int]]]) -> None:
    n = len(results)
    for rank, sites in enumerate(results):
        for name, logical, found, limit in sites:
            op, _, numel = name.partition(".")
            parts = [4 * (int(numel) // (r + 1)) for r in range(n)] if op in ("all_gather", "reduce_scatter") else ()
            assert wire.moved(kind, op, logical, rank, n, parts, 4, limit) == found, (kind, name, rank)


def test_the_transport_of_threads_counts_by_its_formula() -> None:
    check_transport("threads", run_threads(ask_transport, 3))


@pytest.mark.process
@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_transports_of_processes_count_by_their_formulas(kind: Any) -> None:
    check_transport(kind, launch.spawn(ask_transport, 3, backend=kind))


def test_what_distributed_llama_prints() -> None:
    """Its log says 272 KiB a token for Llama-3-8B on two nodes: blocks of 32 values as 34 bytes, sent to every other node."""
    small = degrees.shortened(config("llama-3-8b"))
    assert small is not None
    plan = degrees.stretch(derive(small, 2), 32)
    values = cost.total(cost.predict(plan, 1, 1, "decode", 1), "one-shot", "blocks")
    assert values.sent * 34 // 32 == 278_528 == 272 * 1024
