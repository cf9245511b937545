"""Engines of every family against transformers: whatever a family makes of an attention's name, of a missing mask, of positions that are
not said, or of a cache that counts otherwise, transformers says them all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.decoder import TOLERANCE
from colrow.engine.engine import Engine
from colrow.engine.forward import Forward, left_pad, vocabulary
from colrow.engine.mixed import Mixed
from colrow.engine.stopping import Limits
from colrow.parallel import experts
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive

from . import families, tiny
from .test_engine_generate import PROMPTS, reference, run
from .test_rarer_axes import minimax

NAMES = [*families.FAMILIES, "minimax"]


def default(family: str, dtype: torch.dtype) -> Any:
    """With the attention that transformers chooses."""
    model = tiny.whole(minimax() if family == "minimax" else families.FAMILIES[family](), dtype, attention=None)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("family", NAMES)
def test_greedy_equals_transformers(family: str) -> None:
    model = default(family, torch.float64)
    expected = reference(model, PROMPTS[2], 8)
    Engine(model, single())
    assert run(model, [PROMPTS[2]], limits=Limits(8)) == [expected]


@pytest.mark.parametrize("family", NAMES)
def test_an_engine_computes_what_the_model_does_whatever_its_code_makes_of_its_attentions_name(family: str) -> None:
    """Falcon, for one, has a way of its own for "sdpa" and another for all else, which without a mask sees later tokens."""
    model = default(family, torch.float32)
    ids = torch.tensor([[(7 * at + 1) % 101 for at in range(40)]])
    before = Forward(model)(ids, None, None)[0]
    Engine(model, single())
    assert (Forward(model)(ids, None, None)[0] - before).abs().max() <= 1e-5 * before.abs().max()


def _asked(forward: Forward, whole: Any = lambda logits: logits) -> list[torch.Tensor]:
    """Scores after a prompt; after the same one in two pieces; after rows of two lengths, and a token more."""
    ids = torch.tensor([[(7 * at + 1) % 101 for at in range(23)]])
    at_once, _ = forward(ids, None, None)
    _, past = forward(ids[:, :9], None, None)
    in_pieces, _ = forward(ids[:, 9:], None, past)
    rows, mask = left_pad([[5, 6, 7], list(range(1, 13))], pad=0)
    padded, past = forward(rows, mask, None)
    longer, _ = forward(torch.tensor([[4], [5]]), torch.cat([mask, mask.new_ones(2, 1)], 1), past)
    return [whole(logits) for logits in (at_once, in_pieces, padded[:1], padded[1:], longer[:1], longer[1:])]


def _exact(model: Any) -> list[torch.Tensor]:
    """The same without a cache or padding."""
    prompt = [(7 * at + 1) % 101 for at in range(23)]
    alone = [prompt, prompt, [5, 6, 7], list(range(1, 13)), [5, 6, 7, 4], [*range(1, 13), 5]]
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[:, -1] for ids in alone]


@pytest.mark.parametrize("family", NAMES)
def test_pieces_of_prompts_and_padded_rows_of_heads_that_are_cut_unevenly(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 heads, or 9 and 3 KV heads, on 2 ranks, with weights large enough that all that is seen matters; then greedy tokens."""
    for sizes, heads in ((families.EVEN, 9), (families.PLAIN, 5), (families.LATENT, 5)):
        kv_heads = {"num_key_value_heads": 3 if heads == 9 else 5} if "num_key_value_heads" in sizes else {}
        for name, value in {"hidden_size": 8 * heads, "num_attention_heads": heads, **kv_heads}.items():
            monkeypatch.setitem(sizes, name, value)
    model = default(family, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)
    exact, tokens = _exact(model), reference(model, PROMPTS[2], 8)
    copies, plan = [copy.deepcopy(model) for _ in range(2)], derive(model.config, 2)

    def rank(group: Group) -> tuple[list[torch.Tensor], list[list[int]]]:
        part = parallelize(copies[group.rank], plan, group)
        engine = Engine(part, group)
        found = _asked(Forward(part), Mixed(group, vocabulary(part)).whole)
        return found, run(part, [PROMPTS[2]], group, limits=Limits(8), decoder=engine.decoder)

    for found, mine in run_threads(rank, 2):
        for one, other in zip(exact, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-4 * float(one.abs().max()))
        assert mine == [tokens]


HALVES = ["llama", "gpt2", "mistral", "gemma2", "phi3", "qwen3", "olmo2", "mixtral", "deepseek-v2", "falcon-40b", "mamba2"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", HALVES)
def test_float16_tokens_are_those_of_transformers_generate_in_float16(family: str, ranks: int) -> None:
    """By the program, where there is one. It rounds less often than the modules do, so a token may differ where transformers' own two best
    scores are as close as float16 leaves them: then what is chosen is nearly the best. The first such token is looked at."""
    config = tiny.config(family) if family in tiny.FAMILIES else families.FAMILIES[family]()
    model = tiny.whole(config, torch.float16, attention=None)
    experts.choose(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)  # so that prompts matter
    copies, plan = [copy.deepcopy(model) for _ in range(ranks)], derive(model.config, ranks)

    def rank(group: Group) -> list[list[int]]:
        part: Any = parallelize(copies[group.rank], plan, group) if ranks > 1 else copies[0]
        engine = Engine(part, group)
        found = [row for prompt in PROMPTS for row in run(part, [prompt], group, limits=Limits(16), decoder=engine.decoder)]
        assert (engine.decoder.program is None) == (family == "mamba2"), engine.decoder.why
        return found

    equal = 0
    for prompt, mine in zip(PROMPTS, run_threads(rank, ranks)[0], strict=True):
        theirs = reference(model, prompt, 16)
        same = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), 16)
        equal += same
        if same < 16:
            with torch.no_grad():
                scores = model(torch.tensor([prompt + theirs[:same]])).logits[0, -1].float()
            assert scores.max() - scores[mine[same]] <= TOLERANCE[torch.float16] * scores.abs().max()
    assert equal >= 32, "most of three times 16"
