"""The engine: text in, text out, on one rank and on several; the account of what was exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import account, exchange
from colrow.engine.engine import Chunk, Engine
from colrow.engine.generate import Memory
from colrow.engine.prompts import encode
from colrow.engine.settings import Sampling
from colrow.engine.stopping import Finish
from colrow.errors import UserError
from tests import tiny
from tests.test_engine_text import byte_level

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def model() -> Any:
    return tiny.whole(tiny.config("llama", vocab_size=257, eos_token_id=256), attention="sdpa")


def joined(chunks: list[Chunk]) -> list[str]:
    return ["".join(chunk.texts[row] for chunk in chunks) for row in range(len(chunks[0].texts))]


def test_text_equals_the_decoded_tokens_and_ends_before_a_stop_string() -> None:
    tokenizer = byte_level()
    engine = Engine(model(), single(), tokenizer)
    assert engine.eos == {256}
    assert engine.context == 64
    chunks = list(engine.stream(["Hi", "ab"], Sampling(1.0, seed=5), max_new_tokens=30))
    texts = joined(chunks)
    assert chunks[-1].finished == (Finish.LENGTH, Finish.LENGTH)
    assert engine.clock.prompt_tokens == 4
    assert engine.clock.new_tokens == 60
    assert engine.clock.steps == 30
    tail = texts[1][5:8]
    at = texts[1].find(tail)
    stopped = list(engine.stream(["Hi", "ab"], Sampling(1.0, seed=5), max_new_tokens=30, stop=[tail]))
    assert joined(stopped)[1] == texts[1][:at]
    assert stopped[-1].finished[1] is Finish.STOP
    assert engine.complete(["Hi", "ab"], sampling=Sampling(1.0, seed=5), max_new_tokens=30) == texts


def test_ranks_get_rank_0s_prompt_and_settings() -> None:
    whole = model()
    expected = Engine(whole, single(), byte_level()).complete(["Hello"], sampling=Sampling(1.2, seed=2), max_new_tokens=12)

    def rank(group: Group) -> tuple[list[str], tuple[Finish | None, ...]]:
        if group.rank == 0:
            chunks = list(Engine(whole, group, byte_level()).stream(["Hello"], Sampling(1.2, seed=2), 12))
        else:
            chunks = list(Engine(whole, group).stream([]))
        return joined(chunks), chunks[-1].finished

    results = run_threads(rank, 3)
    assert results == [(expected, (Finish.LENGTH,)), ([""], (Finish.LENGTH,)), ([""], (Finish.LENGTH,))]


@pytest.mark.parametrize("bad", [[], [""], [[]], [[1] * 64], [[1] * 80], ["ok", ""]], ids=lambda p: str(p)[:12])
def test_a_wrong_prompt_is_raised_on_every_rank_and_the_next_one_works(bad: list) -> None:
    """Reports O-36 c and d."""
    whole, raised = model(), []

    def rank(group: Group) -> int:
        engine = Engine(whole, group, byte_level() if group.rank == 0 else None)
        try:
            list(engine.stream(bad, max_new_tokens=5))
        except UserError:
            raised.append(group.rank)
        return len(list(engine.stream(["fine"], max_new_tokens=3)))

    assert run_threads(rank, 2) == [3, 3]
    assert sorted(raised) == [0, 1]


def test_prompts_of_all_kinds() -> None:
    tokenizer = byte_level()
    assert encode(tokenizer, "ab") == [97, 98]
    assert encode(tokenizer, [5, 6]) == [5, 6]
    with pytest.raises(UserError, match="no chat template"):
        encode(tokenizer, [{"role": "user", "content": "x"}])
    tokenizer.chat_template = TEMPLATE
    assert bytes(encode(tokenizer, "ab")) == b"[user]ab[assistant]"
    assert bytes(encode(tokenizer, "ab", raw=True)) == b"ab"
    assert (
        bytes(encode(tokenizer, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])) == b"[system]s[user]u[assistant]"
    )
    with pytest.raises(UserError, match="needs a tokenizer"):
        encode(None, "ab")


def test_a_conversation_continues_in_the_cache() -> None:
    whole, memory = model(), Memory()
    engine = Engine(whole, single(), byte_level())
    first = engine.complete([[10, 11, 12]], max_new_tokens=4, memory=memory)
    prompt = [*memory.ids, 50, 51]
    assert memory.ids[:3] == [10, 11, 12]
    again = engine.complete([prompt], max_new_tokens=4, memory=memory)
    assert again == Engine(whole, single(), byte_level()).complete([prompt], max_new_tokens=4)
    assert len(first) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=5)], ids=str)
def test_the_exchange_costs_what_was_predicted(sampling: Sampling) -> None:
    whole = model()

    def rank(group: Group) -> tuple[account.Traffic | None, list[account.RankMemory]]:
        engine = Engine(whole, group, byte_level() if group.rank == 0 else None)
        list(engine.stream(["Hi", "abc"], sampling, max_new_tokens=6))
        clock = engine.clock
        predicted = [(op, name, 5 * calls, 5 * size) for op, name, calls, size in exchange.predicted(sampling, rows=2, ranks=3, vocab=257)]
        predicted += clock.gathered * exchange.predicted_gather(rows=2, ranks=3, vocab=257, element=8)
        return account.traffic(group, predicted, clock.steps - 1), account.memory(whole, group)

    size = sum(p.numel() * p.element_size() for p in whole.parameters())
    for found, memory in run_threads(rank, 3):
        assert found is not None
        assert found.equal, found
        assert found.calls == 2
        assert [(m.rank, m.parameters) for m in memory] == [(0, size), (1, size), (2, size)]
        assert memory[0].resident > 50_000_000


def test_traffic_names_what_differs() -> None:
    def rank(group: Group) -> account.Traffic | None:
        engine = Engine(torch_model, group, byte_level() if group.rank == 0 else None)
        list(engine.stream(["Hi"], max_new_tokens=3))
        assert account.traffic(group, [], 0) is None
        return account.traffic(group, [("all_reduce", "model.layers.0.mlp", 2, 128)], 2)

    torch_model = model()
    found = run_threads(rank, 2)[0]
    assert found.differing == ("all_gather engine.candidates", "all_reduce model.layers.0.mlp", "broadcast engine.decision")
    assert not torch.is_inference_mode_enabled()
