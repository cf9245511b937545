"""Models whose caches several tokens cannot go on from: Mamba's states begin again with zeros there, and rotary frequencies that depend on
the length leave keys behind that were turned by others. Their prompts go through the model whole, and a conversation is read again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import transformers as tf
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.continuing import _keeps_positions, begins_anew, continues
from colrow.engine.engine import Engine
from colrow.engine.forward import Forward, left_pad
from colrow.engine.generate import Memory, generate
from colrow.engine.request import Request
from colrow.engine.stopping import Limits, context_limit
from colrow.errors import UserError
from colrow.parallel import build
from colrow.planning.derive import derive

from . import families, tiny
from .test_engine_batch import CONFIG, answers, at_once, serve
from .test_engine_generate import reference

SIZES: dict[str, Any] = {**families.SIZES, **CONFIG}
PAIRS: dict[str, Any] = {**SIZES, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 12,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
ALSO: dict[str, Callable[[], Any]] = {
    "mamba": lambda: tf.MambaConfig(**tiny.TOKENS | CONFIG, hidden_size=36, num_hidden_layers=2, state_size=5),
    "longrope": lambda: tf.LlamaConfig(**PAIRS, rope_parameters=LONG),
    "bamba": lambda: tf.BambaConfig(
        **PAIRS, attn_layer_indices=[1], mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=16
    ),
}
T5 = tf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=20, num_layers=1, num_heads=4, decoder_start_token_id=0)
PROMPT = [(7 * at + 3) % 256 for at in range(21)]


@pytest.mark.parametrize("name", ALSO)
def test_answers_are_those_of_transformers_in_a_server_and_in_a_conversation(name: str) -> None:
    """The batch reads prompts in pieces of 8 where it may. Bamba's code, not told otherwise, counts each new token as the first."""
    model = tiny.whole(ALSO[name](), torch.float64, attention=None)
    for p in model.parameters():
        p.data.mul_(4)  # so that what came long before counts
    expected = reference(model, PROMPT, 8)
    requests = [Request(1, tuple(PROMPT), max_new_tokens=8), Request(2, tuple(PROMPT[:10]), max_new_tokens=8)]
    for outputs in (serve(single(), model, at_once(requests)), run_threads(serve, 2, model, at_once(requests))[0]):
        assert answers(outputs)[1][0] == expected
    memory = Memory()
    for known in (9, 21):
        steps = [step.tokens[0] for step in generate(model, single(), [PROMPT[:known]], limits=Limits(8), memory=memory)]
        memory.ids = PROMPT[:known] if known < 21 else memory.ids  # what was answered is no part of the next turn here
    assert steps == expected


def test_which_caches_may_be_gone_on_from() -> None:
    cut = {"mamba": False, "longrope": False, "bamba": False, "mistral": True, "gemma3": True, "bloom": True, "falcon-h1": False}
    for name, expected in cut.items():
        model = tiny.whole(ALSO[name]() if name in ALSO else families.FAMILIES[name](), torch.float32, attention=None)
        assert continues(Forward(model), single(), context_limit(model.config)) is expected, name
    engine = Engine(tiny.whole(tiny.config("llama"), torch.float32), single())
    assert engine.decoder.continues, "without a program it is looked at"


PHI: dict[str, Any] = {**PAIRS, "rope_parameters": LONG, "original_max_position_embeddings": 12}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.3}
BORDERS: dict[str, Callable[[], Any]] = {
    "phi3": lambda: tf.Phi3Config(**PHI),
    "phimoe": lambda: tf.PhimoeConfig(**{**PHI, "intermediate_size": 64, "rope_parameters": LONG | MSCALES}, num_local_experts=4),
}


@pytest.fixture(scope="module", params=BORDERS)
def bordered(request: pytest.FixtureRequest) -> Any:
    """A model whose `generate` computes all tokens again when there are 13."""
    model = tiny.whole(BORDERS[request.param](), torch.float64, attention=None)
    model.set_experts_implementation("eager")
    for p in model.parameters():
        p.data.mul_(4)
    assert begins_anew(Forward(model), context_limit(model.config)) == 13
    return model


def test_where_a_models_generate_drops_its_cache_so_does_the_engine(bordered: Any) -> None:
    """Prompts on both sides of the border, and one whose first new token is the 13th."""
    prompts = [PROMPT[:known] for known in (7, 12, 13, 21)]
    expected = [reference(bordered, prompt, 16) for prompt in prompts]
    plain = [row for step in (generate(bordered, single(), prompts[:1], limits=Limits(16))) for row in step.tokens]
    assert plain == expected[0]

    def rank(group: Group) -> list[list[int]]:
        part = build.parallelize(copy.deepcopy(bordered), derive(bordered.config, group.size), group)
        return [[step.tokens[0] for step in generate(part, group, [p], limits=Limits(16), memory=Memory())] for p in prompts]

    assert run_threads(rank, 2) == [expected, expected]


@pytest.mark.parametrize("name", ["phi3", "longrope"])
def test_a_program_has_the_frequencies_of_its_position(name: str) -> None:
    """In float32, where programs are made. They write to the same buffers as the modules, which is no change of the model."""
    model = tiny.whole((BORDERS | ALSO)[name](), torch.float32, attention=None)
    for p in model.parameters():
        p.data.mul_(3)
    prompts = [PROMPT[:known] for known in (7, 12, 13, 21)]
    expected = [reference(model, prompt, 16) for prompt in prompts]

    def rank(group: Group) -> tuple[list[list[int]], bool]:
        part = build.parallelize(copy.deepcopy(model), derive(model.config, group.size), group)
        decoder, programs, found = Engine(part, group).decoder, set[int](), []
        for prompt in prompts:
            steps = generate(part, group, [prompt], limits=Limits(16), decoder=decoder, memory=Memory())
            found.append([step.tokens[0] for step in steps])
            programs.add(id(decoder.program))
        twice = [step.tokens for step in generate(part, group, [prompts[0]] * 2, limits=Limits(16), decoder=decoder)]
        assert [list(row) for row in zip(*twice, strict=True)] == [expected[0]] * 2
        return found, decoder.program is not None and len(programs) == 1 and not decoder.continues

    assert run_threads(rank, 2) == [(expected, True)] * 2
    requests = [Request(at, tuple(PROMPT[:known]), max_new_tokens=16) for at, known in enumerate((7, 12, 13, 21))]
    for options in ({}, {"cache_tokens": 64}):
        outputs = answers(run_threads(lambda group, options=options: serve(group, model, at_once(requests), **options), 2)[0])
        assert [outputs[at][0] for at in range(4)] == expected
    together = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, mask = left_pad([PROMPT[:4], PROMPT[:9]], 0)
    rows = [
        step.tokens
        for step in generate(model, single(), [PROMPT[:4], PROMPT[:9]], limits=Limits(12), decoder=Engine(model, single()).decoder)
    ]
    assert [list(row) for row in zip(*rows, strict=True)] == model.generate(ids, attention_mask=mask, **together)[:, 9:].tolist()


def test_rows_of_other_lengths_are_computed_again_at_the_width_of_all(bordered: Any) -> None:
    prompts = [PROMPT[:4], PROMPT[:9]]
    ids, mask = left_pad(prompts, 0)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = bordered.generate(ids, attention_mask=mask, **options)[:, 9:].tolist()
    steps = [step.tokens for step in generate(bordered, single(), prompts, limits=Limits(12))]
    assert [list(row) for row in zip(*steps, strict=True)] == expected


@pytest.mark.parametrize("options", [{}, {"fast": True}, {"cache_tokens": 48}], ids=["roomy", "fast", "pausing"])
def test_a_server_computes_each_sequence_again_at_its_own_border(bordered: Any, options: dict[str, Any]) -> None:
    requests = [Request(at, tuple(PROMPT[at:][:known]), max_new_tokens=14) for at, known in enumerate((3, 7, 12, 13, 20), 1)]
    expected = {r.id: reference(bordered, list(r.ids), 14) for r in requests}
    outputs = answers(run_threads(lambda group: serve(group, bordered, at_once(requests), **options), 2)[0])
    assert {id: tokens for id, (tokens, _, _) in outputs.items()} == expected


def test_the_account_counts_a_step_that_computes_all_again(bordered: Any) -> None:
    def rank(group: Group) -> tuple[int, int, int]:
        part = build.parallelize(copy.deepcopy(bordered), derive(bordered.config, group.size), group)
        engine = Engine(part, group)
        engine.complete([PROMPT[:7]], max_new_tokens=10)
        calls = sum(tally.calls for (phase, _, name), tally in group.counters.sites.items() if phase == "decode" and "layers.0" in name)
        return engine.clock.anew, engine.clock.steps, calls

    for anew, steps, calls in run_threads(rank, 2):
        assert (anew, calls) == (1, 2 * (steps - 2))


def test_others_never_drop_it() -> None:
    for model in (tiny.whole(tiny.config("llama")), tiny.whole(tiny.config("gpt2")), tf.T5ForConditionalGeneration(T5)):
        assert begins_anew(Forward(model), 64) is None


def test_a_state_in_modules_is_refused() -> None:
    """RecurrentGemma's: each token would begin with an empty one, since no cache comes back that would carry it."""
    config = tf.RecurrentGemmaConfig(**{**PAIRS, "num_hidden_layers": 3}, lru_width=48, attention_window_size=7)
    with pytest.raises(UserError, match="keeps the state of one sequence in its modules"):
        Engine(tiny.whole(config, torch.float64, attention=None), single())


def test_a_cache_of_two_caches_is_not_gone_on_from() -> None:
    """BLT's, which has no layers of its own to look at."""

    def forward(*_: Any) -> Any:
        return None, EncoderDecoderCache(DynamicCache(), DynamicCache())

    assert not _keeps_positions(cast("Forward", forward), torch.tensor([[1]]))
