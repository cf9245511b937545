"""Generation against transformers' own generate on the whole model: greedy, batches of different lengths, stops, cached turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.candidates import NonFiniteLogits
from colrow.engine.forward import Forward, left_pad
from colrow.engine.generate import Memory, generate
from colrow.engine.settings import Sampling
from colrow.engine.stopping import Finish, Limits
from colrow.errors import UserError
from colrow.proof.precision import Float64
from tests import tiny

PROMPTS = [[5], [0, 100, 7, 33, 8], [9, 8, 7, 6, 5, 4, 3, 50, 60, 70, 80, 90]]


def whole(family: str) -> Any:
    return tiny.whole(tiny.config(family), attention="sdpa")


def reference(model: Any, prompt: list[int], count: int, eos: int | None = None) -> list[int]:
    """Transformers' greedy continuation."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), **options)[
        0, len(prompt) :
    ].tolist()


def run(model: Any, prompts: list[list[int]], group: Group | None = None, **arguments: Any) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(model, group or single(), prompts, **arguments):
        for row, token in zip(rows, step.tokens, strict=True):
            row.extend([] if token is None else [token])
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_greedy_equals_transformers(family: str) -> None:
    model = whole(family)
    for prompt in PROMPTS:
        assert run(model, [prompt], limits=Limits(20)) == [reference(model, prompt, 20)]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_batch_of_different_lengths_equals_each_alone(family: str) -> None:
    """Report O-36 f: left padding must not shift positions."""
    model = whole(family)
    together = run(model, PROMPTS, limits=Limits(12))
    assert together == [run(model, [prompt], limits=Limits(12))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_left_padding_does_not_change_logits(family: str) -> None:
    """Report O-36 f, on Bloom too, whose ALiBi counts positions from the mask. (Its softmax is float32 whatever the dtype, where the mask
    of float64 is minus infinity: so all is computed in float64.)"""
    model = whole(family) if family != "bloom" else tiny.whole(BloomConfig(vocab_size=101, hidden_size=36, n_layer=2, n_head=9))
    with Float64():
        forward, (ids, mask) = Forward(model), left_pad(PROMPTS, pad=0)
        padded, past = forward(ids, mask, None)
        longer, _ = forward(torch.tensor([[4], [5], [6]]), torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], 1), past)
        for row, prompt in enumerate(PROMPTS):
            alone, past = forward(torch.tensor([prompt]), None, None)
            torch.testing.assert_close(padded[row], alone[0], atol=1e-10, rtol=0)
            torch.testing.assert_close(longer[row], forward(torch.tensor([[4 + row]]), None, past)[0][0], atol=1e-10, rtol=0)


def test_a_row_that_ends_leaves_the_others_alone() -> None:
    model = whole("llama")
    alone = [reference(model, prompt, 12) for prompt in PROMPTS]
    eos = alone[0][4]
    cut = [row[: row.index(eos) + 1] if eos in row else row for row in alone]
    steps = list(generate(model, single(), PROMPTS, limits=Limits(12, eos=frozenset({eos}))))
    rows = [[step.tokens[r] for step in steps if step.tokens[r] is not None] for r in range(3)]
    assert rows == cut
    assert steps[-1].finished[0] is Finish.EOS
    assert {len(row) for row in rows} != {12}


def test_the_context_is_a_limit() -> None:
    model = whole("llama")  # 64 positions
    limits = Limits(context=64)
    prompt = [int(i) for i in torch.randint(3, 100, (63,))]
    steps = list(generate(model, single(), [prompt], limits=limits))
    assert [step.finished for step in steps] == [(Finish.CONTEXT,)]
    for bad in ([[*prompt, 1]], [[*prompt, 1, 2]], [[]], []):
        with pytest.raises(UserError):
            generate(model, single(), bad, limits=limits)
    assert list(generate(model, single(), [[1]], limits=Limits(0))) == []


def test_watch_ends_a_row() -> None:
    model, seen = whole("llama"), []

    def watch(row: int, token: int) -> Finish | None:
        seen.append((row, token))
        return Finish.STOP if row == 1 and len(seen) > 6 else None

    steps = list(generate(model, single(), PROMPTS[:2], limits=Limits(6), watch=watch))
    assert steps[-1].finished == (Finish.LENGTH, Finish.STOP)
    assert [token for row, token in seen if row == 0] == [step.tokens[0] for step in steps]
    assert steps[-1].tokens[1] is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_turns_of_a_conversation_share_the_cache(family: str) -> None:
    model, memory = whole(family), Memory()
    prompt = list(PROMPTS[1])
    for turn in range(3):
        (row,) = run(model, [prompt], limits=Limits(6), memory=memory)
        assert row == reference(model, prompt, 6)
        assert memory.ids == prompt + row[:-1]  # the last token has not been fed yet
        prompt = prompt + row + [11 + turn, 12]
        assert memory.take(prompt)[1] == prompt[-3:]
        memory.keep(memory.ids, memory.past)
    assert run(model, [PROMPTS[2]], limits=Limits(6), memory=memory) == [reference(model, PROMPTS[2], 6)]  # another beginning: from scratch


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    model = whole("llama")
    texts = [run(model, [PROMPTS[1]], sampling=Sampling(1.5, seed=seed), limits=Limits(20)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    rows = run(model, [PROMPTS[1]] * 2, sampling=Sampling(1.5, seed=1), limits=Limits(20))
    assert rows[0] != rows[1]  # rows of one call draw apart


def test_ranks_that_hold_everything_agree() -> None:
    """Report O-35: with sampling, every rank ends with rank 0's ids."""
    model = whole("llama")

    def rank(group: Group) -> list[list[int]]:
        return run(model, PROMPTS, group, sampling=Sampling(1.5, top_p=0.95, seed=4), limits=Limits(15))

    assert run_threads(rank, 3) == [run(model, PROMPTS, sampling=Sampling(1.5, top_p=0.95, seed=4), limits=Limits(15))] * 3


def test_nan_in_the_weights_is_named() -> None:
    model = whole("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(NonFiniteLogits, match="101 logits of prompt 0 are NaN"):
        run(model, [[1, 2]], limits=Limits(3))


def test_prefill_and_decode_are_counted_apart() -> None:
    model = whole("llama")

    def rank(group: Group) -> dict[tuple[str, str, str], int]:
        run(model, [[5, 6]], group, limits=Limits(5))
        return {key: tally.calls for key, tally in group.counters.sites.items()}

    expected = {("prefill", "all_gather"): 1, ("prefill", "broadcast"): 1, ("decode", "all_gather"): 4, ("decode", "broadcast"): 4}
    for calls in run_threads(rank, 2):
        assert {(phase, op): count for (phase, op, _), count in calls.items()} == expected
