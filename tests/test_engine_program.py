"""Programs against the modules they stand for: scores, greedy tokens, rows alone and in company, what is refused, what is found wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import compiled, steps
from colrow.engine.decoder import Decoder, _Choices
from colrow.engine.forward import Forward
from colrow.engine.generate import Memory, generate
from colrow.engine.slots import ROOM, Slot
from colrow.engine.stopping import Limits
from colrow.kernels.library import Op
from colrow.parallel import experts
from colrow.parallel.adapters import add_adapter, merge_adapter
from colrow.parallel.build import parallelize
from colrow.parallel.int8 import quantize_layers
from colrow.planning.derive import derive
from tests import families, tiny

RECORDED = """mistral qwen3 gemma gemma2 gemma3 phi phi3 gpt-neox gpt-neox-sequential gptj opt cohere cohere-norm stablelm glm granite
olmo starcoder2 olmo2 mixtral qwen2-moe qwen3-moe olmoe minimax-m2 gpt-oss bloom mpt falcon-7b falcon-rw falcon-40b
deepseek-v2 deepseek-v3 stablelm-parallel stablelm-qk olmo3"""
PROMPTS = [[5], [0, 100, 7, 33, 8], [9, 8, 7, 6, 5, 4, 3, 50, 60, 70, 80, 90]]


def config(family: str, **changes: Any) -> Any:
    return tiny.config(family, **changes) if family in tiny.FAMILIES else families.FAMILIES[family]()


def whole(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = tiny.whole(config(family, **changes), dtype)
    experts.choose(model)
    return model


def prepared(model: Any, group: Group) -> Decoder:
    decoder = Decoder(model, group)
    decoder.prepare()
    return decoder


def split(model: Any, ranks: int, task: Any, weights: tuple[float, ...] | None = None) -> list[Any]:
    """task(model's part, group) on every rank."""
    plan = derive(model.config, ranks, weights)
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    return run_threads(lambda group: task(parallelize(copies[group.rank], plan, group), group), ranks)


def rows(steps: list) -> list[list[int]]:
    return [[step.tokens[row] for step in steps if step.tokens[row] is not None] for row in range(len(steps[0].tokens))]


def exact(model: Any, group: Group) -> tuple[bool, bool]:
    decoder = prepared(model, group)
    return decoder.program is not None, decoder.difference < 1e-5


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_scores_are_the_modules_at_any_degree(family: str, ranks: int) -> None:
    assert split(whole(family), ranks, exact) == [(True, True)] * ranks


@pytest.mark.parametrize("family", RECORDED.split())
def test_scores_are_the_modules_in_other_families(family: str) -> None:
    assert split(whole(family), 2, exact) == [(True, True)] * 2


@pytest.mark.parametrize("family", ["falcon-rw", "falcon-7b", "falcon-40b", "deepseek-v2", "deepseek-v3"])
def test_scores_are_the_modules_under_the_attention_that_transformers_chooses(family: str) -> None:
    """Falcon adds its positions' biases once under "sdpa", and twice under "eager"."""
    model = tiny.whole(config(family), torch.float32, attention=None)
    experts.choose(model)
    assert split(model, 2, exact) == [(True, True)] * 2


def test_unequal_ranks() -> None:
    assert split(whole("qwen2"), 2, exact, (3.0, 1.0)) == [(True, True)] * 2


def test_a_rank_without_heads_of_latents() -> None:
    """Six heads on seven ranks: the last one keeps the latents all the same."""
    assert split(whole("deepseek-v3"), 7, exact) == [(True, True)] * 7


def test_a_rank_without_heads() -> None:
    model = whole("llama", hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert split(model, 5, exact) == [(True, True)] * 5


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "gpt-oss", "mixtral", "bloom", "falcon-rw", "deepseek-v3"])
def test_greedy_tokens_are_the_modules_for_hundreds_of_positions(family: str) -> None:
    """Past the room of a slot, and past the window of those that have one."""
    changes = {"max_position_embeddings": 512} if family == "llama" else {}
    model = whole(family, **changes)
    limits = Limits(ROOM + 9 if family == "llama" else 45)
    expected = rows(list(generate(model, single(), PROMPTS, limits=limits)))

    def tokens(part: Any, group: Group) -> list[list[int]]:
        return rows(list(generate(part, group, PROMPTS, limits=limits, decoder=prepared(part, group))))

    assert tokens(model, single()) == expected
    assert split(model, 2, tokens) == [expected] * 2


def test_turns_of_a_conversation_go_from_modules_to_program_and_back() -> None:
    for family in ("llama", "mistral"):
        model = whole(family)
        decoder, with_program, without = prepared(model, single()), Memory(), Memory()
        prompt = list(PROMPTS[1])
        for turn in range(3):
            (mine,) = rows(list(generate(model, single(), [prompt], limits=Limits(6), memory=with_program, decoder=decoder)))
            (theirs,) = rows(list(generate(model, single(), [prompt], limits=Limits(6), memory=without)))
            assert mine == theirs
            assert with_program.ids == without.ids
            prompt = prompt + mine + [11 + turn, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_rows_bits_do_not_depend_on_its_company_nor_on_threads(dtype: torch.dtype) -> None:
    """Widths that are no multiple of a vector, more rows of weights than one thread's line, all numbers of columns from 1 to 11."""
    changes = {"hidden_size": 72, "intermediate_size": 1051, "vocab_size": 311}
    model = whole("llama", dtype, **changes)
    found: list[torch.Tensor] = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            program = prepared(model, single()).program
        finally:
            torch.set_num_threads(before)
        assert program is not None
        pasts = [Forward(model)(torch.tensor([[at, *range(9 * at, 10 * at)]]), None, None)[1] for at in range(1, 12)]
        alone = torch.cat([program.run([at], [Slot(past)]) for at, past in enumerate(pasts)])
        for count in range(1, 12):
            together = program.run(list(range(count)), [Slot(past) for past in pasts[:count]])
            assert torch.equal(together, alone[:count]), count
        found.append(alone)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("family", ["llama", "qwen2-moe"])
def test_seventy_rows_in_one_call(family: str) -> None:
    """Experts too: those of rows together are those of each alone."""
    model = whole(family)
    program = prepared(model, single()).program
    assert program is not None
    _, past = Forward(model)(torch.tensor([PROMPTS[1]]), None, None)
    together = program.run(list(range(70)), [Slot(past) for _ in range(70)])
    assert torch.equal(together, torch.cat([program.run([at], [Slot(past)]) for at in range(70)]))


def test_sums_are_counted_as_the_modules_count_theirs() -> None:
    def counts(part: Any, group: Group) -> dict[str, tuple[int, int]]:
        out = {}
        for decoder in (None, prepared(part, group)):
            group.counters.reset()
            list(generate(part, group, [PROMPTS[1]], limits=Limits(5), decoder=decoder))
            sites = group.counters.sites
            out[str(decoder is None)] = {key: (tally.calls, tally.logical_bytes) for key, tally in sites.items()}
        return out

    for of_rank in split(whole("llama"), 2, counts):
        assert of_rank["True"] == of_rank["False"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mamba2", "cache is not one of keys and values")],
)
def test_what_cannot_be_recorded_runs_by_its_modules(family: str, reason: str) -> None:
    decoder = prepared(whole(family), single())
    assert decoder.program is None
    assert reason in decoder.steps


def test_a_position_that_the_code_looks_at_is_refused() -> None:
    """Rotary frequencies that change with the length: right at the first positions, wrong later."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny.whole(LlamaConfig(**tiny.GROUPED, rope_parameters=rope), torch.float32, attention="sdpa")
    decoder = prepared(model, single())
    assert "looks at the position" in decoder.why


@pytest.mark.parametrize("own", [False, True])
def test_positions_that_come_in_unseen_are_refused(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model that counts positions itself: what is recorded at one position is wrong at the next."""
    model = whole("llama")
    monkeypatch.setattr(type(model), "_supports_attention_backend", not own)
    decoder = Decoder(model, single())
    decoder._forward.takes_positions = False
    decoder.prepare()
    assert ("looks at the position" if own else "takes no positions") in decoder.why


@pytest.mark.parametrize(
    ("family", "dtype"), [("mixtral", torch.float32), ("qwen3-moe", torch.bfloat16), ("gpt-oss", torch.float32)], ids=str
)
def test_only_the_experts_that_are_chosen_are_read(family: str, dtype: torch.dtype) -> None:
    """The others become not a number. Rows that choose otherwise are the same bits together and alone."""
    model = whole(family, dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(20 if name.endswith(("router.weight", "gate.weight")) else 1)
    program, chosen = prepared(model, single()).program, set[tuple[int, int]]()
    assert program is not None
    pasts = [Forward(model)(torch.tensor([[at, 9, at + 1]]), None, None)[1] for at in range(6)]
    clean = [program.run([at], [Slot(past)]) for at, past in enumerate(pasts)]
    for at, past in enumerate(pasts):
        with _Choices() as choices:
            Forward(model)(torch.tensor([[at]]), None, copy.deepcopy(past))
        chosen |= {(layer, int(place)) for layer, places in enumerate(choices.places) for place in places.flatten()}
        if at == 0:
            first = set(chosen)
    layers = [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "down_proj")]
    with torch.no_grad():
        for layer, module in enumerate(layers):
            for place in {0, 1, 2, 3} - {place for at, place in first if at == layer}:
                module.gate_up_proj[place], module.down_proj[place] = float("nan"), float("nan")
    assert torch.equal(program.run([0], [Slot(pasts[0])]), clean[0])
    assert len(chosen) > len(first)
    assert bool(torch.cat([program.run([at], [Slot(past)]) for at, past in enumerate(pasts)]).isnan().any())


def test_a_router_that_chooses_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is told what the modules chose, so only what the choice gives away can show it."""
    original = compiled.compile

    def turned(tape: Any) -> Any:
        made = original(tape)
        at = next(at for at, step in enumerate(made.steps) if step.op is Op.TOPK)
        x = made.steps[at].sources[0]
        made.steps.insert(at, steps.Step(Op.NEG, [x], (x,)))
        return made

    monkeypatch.setattr(compiled, "compile", turned)
    assert "differs by" in prepared(whole("gpt-oss"), single()).why


@pytest.mark.parametrize("family", ["llama-bias", "gpt2", "mixtral", "gpt-oss", "bloom"])
def test_float16(family: str) -> None:
    def rank(part: Any, group: Group) -> tuple[str, bool]:
        decoder = prepared(part, group)
        return decoder.why, decoder.difference < 0.005

    assert split(whole(family, torch.float16), 2, rank) == [("", True)] * 2


def _written(model: Any) -> None:
    """As an optimizer does it: in place."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5).add_(0.01)


def _adapted(model: Any) -> None:
    add_adapter(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False), seed=1)


CHANGES = {
    "written to": [_written],
    "elsewhere": [lambda model: model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()}, assign=True)],
    "quantized": [quantize_layers],
    "adapted": [_adapted],
    "merged": [_adapted, merge_adapter],
    "merged by PEFT": [_adapted, lambda model: [m.merge() for m in model.modules() if hasattr(m, "merged_adapters")]],
}
CASES = [(name, dtype) for name in CHANGES for dtype in (torch.float32, torch.bfloat16) if "merged" not in name or dtype is torch.float32]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_model_that_has_changed_gets_another_program(name: str, dtype: torch.dtype) -> None:
    def rank(part: Any, group: Group) -> list[float]:
        decoder, forward, off = Decoder(part, group), Forward(part), []
        for change in (lambda model: None, *CHANGES[name]):
            change(part)
            decoder.prepare()
            kept = decoder.program
            decoder.prepare()
            assert decoder.program is kept
            assert kept is not None, decoder.why
            _, past = forward(torch.tensor([PROMPTS[1]]), None, None)
            slot = Slot(past)
            mine, theirs = kept.run([9], [slot])[0], forward(torch.tensor([[9]]), None, past)[0][0].float()
            off.append(float((mine - theirs).abs().max() / theirs.abs().max()))
        return off

    for found in split(whole("llama-bias", dtype), 2, rank):
        assert max(found) < (1e-4 if dtype is torch.float32 else 0.05)


def test_float64_runs_by_its_modules() -> None:
    assert "torch.float64" in prepared(whole("llama", torch.float64), single()).why


@pytest.mark.parametrize("broken", [Op.ADD, Op.NEG, Op.REDUCE, Op.ATTEND])
def test_a_wrong_program_is_found_and_not_used(broken: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions of one kind are left out, on one rank."""
    original = compiled.compile

    def without(tape: Any) -> Any:
        made = original(tape)
        for at, step in enumerate(made.steps):
            if step.op is broken:
                made.steps[at] = steps.Step(Op.COPY, [step.outs[0]], (step.outs[0],))
        return made

    monkeypatch.setattr(compiled, "compile", without)
    results = split(whole("llama"), 2, lambda part, group: (prepared(part, group).program, prepared(part, group).why))
    assert all(program is None and "differs by" in why for program, why in results)
