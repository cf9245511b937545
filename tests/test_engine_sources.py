"""Programs of encoder-decoders: scores against the modules', what is added to scores, rows alone and in company, what is refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine import compiled, recorded
from colrow.engine import decoder as decoders
from colrow.engine.batch import Batch
from colrow.engine.generate import generate
from colrow.engine.request import Output
from colrow.engine.slots import Slot, as_cache
from colrow.engine.stopping import Limits
from colrow.engine.tape import NotRecorded
from colrow.engine.translate import Translate
from colrow.errors import RankError
from colrow.kernels.library import Op
from colrow.parallel.int8 import quantize_layers
from colrow.planning.models import build
from colrow.proof.noise import add_noise

from .families import OWN_CODE, TRANSLATORS
from .test_engine_batch import at_once, serve
from .test_engine_program import exact, prepared, rows, split
from .test_engine_program import whole as of_decoder
from .test_engine_translate import request, speaking

CASES = [(family, 2) for family in TRANSLATORS if family != "whisper"]
CASES += [(family, ranks) for family in OWN_CODE for ranks in (1, 2)]
CASES += [("t5", 1), ("t5", 4), ("t5", 7), ("bart", 1), ("bart", 7)]  # 6 heads: in fours and twos, and one more rank than heads
PROMPTS = [[5, 7, 8], [9, 8, 7, 6, 5, 4, 3, 50, 60, 70, 80, 90], [11]]


def whole(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = build((TRANSLATORS | OWN_CODE)[family](), dtype=torch.float32).eval()
    add_noise(model)
    return model.to(dtype)


def read(model: Any, prompt: list[int], new: list[int]) -> tuple[Translate, Any]:
    """How the model goes on after `new` tokens, and its cache."""
    forward = Translate(model, [prompt], torch.device("cpu"))
    return forward, forward(torch.tensor([new]), None, None)[1]


@pytest.mark.parametrize(("family", "ranks"), CASES)
def test_scores_are_the_modules(family: str, ranks: int) -> None:
    assert split(whole(family), ranks, exact) == [(True, True)] * ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_scores_in_16_bits(family: str, dtype: torch.dtype) -> None:
    assert prepared(whole(family, dtype), single()).why == ""


def test_keys_that_others_are_put_in_front_of_are_not_the_caches() -> None:
    """MVP with prompts: attention of its own, to more than what the encoder made and the cache holds."""
    config = OWN_CODE["mvp"]()
    config.use_prompt, config.prompt_length, config.prompt_mid_dim = True, 3, 20
    model = build(config, dtype=torch.float32).eval()
    add_noise(model)
    assert prepared(model, single()).why == "its attention does cat with its keys, values or scores"


def test_what_is_too_large_for_float16_is_what_t5_makes_of_it() -> None:
    """It asks for infinities, which are none in a program's float32, and then bounds all numbers a little lower."""
    model = whole("t5", torch.float16)
    with torch.no_grad():
        model.decoder.block[0].layer[-1].DenseReluDense.wo.weight.mul_(1e5)
    largest = list[float]()
    hook = model.decoder.block[0].register_forward_hook(lambda module, given, out: largest.append(float(out[0].abs().max())))
    read(model, PROMPTS[0], [2, 5])
    hook.remove()
    assert largest == [64512], "numbers were bounded"
    decoder = prepared(model, single())
    assert decoder.why == ""
    assert decoder.difference < 0.003


@pytest.mark.parametrize("times", [1.0, 6e4])
def test_a_choice_by_infinities_is_made_in_each_step(times: float) -> None:
    model = whole("t5", torch.float16)
    factors = list[torch.Tensor]()

    def halves(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        factors.append(torch.where(torch.isinf(out * times).any(), 0.5, 1.0))
        return out * factors[-1]

    model.decoder.final_layer_norm.register_forward_hook(halves)
    assert prepared(model, single()).why == ""
    assert float(factors[-1]) == (0.5 if times > 1 else 1)


@pytest.mark.parametrize(("family", "ranks"), [("t5", 2), ("umt5", 1), ("pegasus", 3)])
def test_greedy_tokens_are_the_modules(family: str, ranks: int) -> None:
    """Of prompts of several lengths side by side."""
    model, limits = speaking(family), Limits(40)
    expected = rows(list(generate(model, single(), PROMPTS, limits=limits)))
    assert len({tuple(row) for row in expected}) == len(PROMPTS), "a test that tells prompts apart"

    def tokens(part: Any, group: Group) -> list[list[int]]:
        decoder = prepared(part, group)
        assert decoder.program is not None, decoder.why
        return rows(list(generate(part, group, PROMPTS, limits=limits, decoder=decoder)))

    assert (split(model, ranks, tokens) if ranks > 1 else [tokens(model, single())]) == [expected] * ranks


@pytest.mark.parametrize(
    ("family", "ranks", "new"),
    [
        *(("t5", 2, 150), ("umt5", 3, 150), ("bart", 2, 60), ("m2m100", 2, 60), ("t5gemma", 2, 90)),
        *(("mvp", 3, 60), ("led", 2, 60), ("fsmt", 2, 60)),
    ],
)
def test_scores_are_the_modules_far_along(family: str, ranks: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the room of a slot, past a window, past the end of a T5's table and of where it was recorded. Tokens are drawn."""
    monkeypatch.setattr(decoders, "FAR", 100)
    drawn = torch.randint(0, 101, (new, len(PROMPTS)), generator=torch.Generator().manual_seed(3)).tolist()

    def largest(part: Any, group: Group) -> float:
        program, off = prepared(part, group).program, 0.0
        assert program is not None
        forwards, pasts = map(list, zip(*(read(part, prompt, [2]) for prompt in PROMPTS), strict=True))
        slots = [Slot(copy.deepcopy(past)) for past in pasts]
        for tokens in drawn:
            mine = program.run(tokens, slots)
            for row, (forward, token) in enumerate(zip(forwards, tokens, strict=True)):
                theirs, pasts[row] = forward(torch.tensor([[token]]), None, pasts[row])
                off = max(off, float((mine[row] - theirs[0]).abs().max() / theirs.abs().max()))
        return off

    assert max(split(whole(family), ranks, largest)) < 1e-4


def test_what_is_added_at_a_distance_is_a_table_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = whole("t5")  # its last bucket begins 12 positions back
    program = prepared(model, single()).program
    assert program is not None
    tables = [step.entry.bias for step in program.compiled.steps if step.op is Op.ATTEND and not step.entry.source]
    assert [table.shape for table in tables] == [(6, 13)] * 2
    monkeypatch.setattr(decoders, "FAR", 16)
    assert "still changes 17 positions back" in prepared(model, single()).why


def test_what_is_added_by_more_than_the_distance_is_found() -> None:
    model = whole("t5")
    attention: Any = model.decoder.block[0].layer[0].SelfAttention
    by_distance = attention.compute_bias
    attention.compute_bias = lambda rows, columns, **named: by_distance(rows, columns, **named) * (1 + 0.1 * (columns % 2))
    assert "looks at the position" in prepared(model, single()).why


def test_a_table_of_positions_that_is_not_long_enough_is_found() -> None:
    """M2M100's code asks in each step whether its table must grow. Where it must before the context ends, a program would look past it."""
    model = whole("m2m100")
    embed: Any = model.model.decoder.embed_positions
    embed.weights = embed.weights[:40].clone()
    assert "looks at the position" in prepared(model, single()).why


def test_another_table_behind_a_bound_is_found() -> None:
    """The same ops at both ends, of other numbers."""
    model = whole("m2m100")
    embed: Any = model.model.decoder.embed_positions
    near, far = embed.weights, embed.weights * 2

    def chooses(module: Any, given: Any) -> None:
        module.weights = far if given[2] > 40 else near  # the number of positions before

    embed.register_forward_pre_hook(chooses)
    assert "looks at the position" in prepared(model, single()).why


@pytest.mark.parametrize("family", ["t5", "marian", "mvp"])
def test_rows_bits_do_not_depend_on_their_company(family: str) -> None:
    model = whole(family, torch.bfloat16)
    program = prepared(model, single()).program
    assert program is not None
    pasts = [read(model, list(range(3, 4 + 5 * at)), [2, *range(at)])[1] for at in range(9)]
    alone = torch.cat([program.run([at], [Slot(past)]) for at, past in enumerate(pasts)])
    assert torch.equal(program.run(list(range(9)), [Slot(past) for past in pasts]), alone)
    assert len({tuple(row) for row in alone.tolist()}) == 9


def test_modules_go_on_where_a_program_stopped() -> None:
    for family in ("t5", "bart"):
        model = whole(family)
        program = prepared(model, single()).program
        assert program is not None
        forward, past = read(model, PROMPTS[0], [2, 5])
        slot = Slot(copy.deepcopy(past))
        for token in (7, 8):
            program.run([token], [slot])
            _, past = forward(torch.tensor([[token]]), None, past)
        mine, back = forward(torch.tensor([[9]]), None, as_cache(slot))
        assert torch.allclose(mine, forward(torch.tensor([[9]]), None, past)[0], rtol=1e-5, atol=1e-5)
        assert torch.allclose(program.run([4], [Slot(back)]), forward(torch.tensor([[4]]), None, past)[0], rtol=1e-4, atol=1e-4)


def test_int8() -> None:
    model = whole("flan-t5")
    quantize_layers(model)
    decoder = prepared(model, single())
    assert decoder.program is not None, decoder.why
    assert decoder.program.int8


@pytest.mark.parametrize(
    ("family", "dtype", "ranks"), [("t5", torch.bfloat16, 1), ("marian", torch.float32, 2), ("m2m100", torch.bfloat16, 1)]
)
def test_requests_that_join_and_leave_at_every_step_get_the_bits_they_get_alone(family: str, dtype: torch.dtype, ranks: int) -> None:
    """In a server's batch, log-probabilities included: some begin while others go on, one goes away, the cache is too small for all."""
    model = speaking(family).to(dtype)
    asked = [request(at, "a longer prompt than others have"[: 3 + 5 * at], logprobs=2, max_new_tokens=4 + 3 * at) for at in range(6)]

    def told(script: Any, **options: Any) -> dict[int, list[Any]]:
        def rank(group: Group) -> list[Output]:
            return serve(group, model, script, **options)

        found: dict[int, list[Any]] = {}
        for output in run_threads(rank, ranks)[0] if ranks > 1 else rank(single()):
            found.setdefault(output.id, []).extend([*output.tokens, *output.logprobs, *([output.finish] if output.finish else [])])
        return found

    def come_and_go(batch: Batch, step: int, outputs: list[Output]) -> bool:
        for number, one in enumerate(asked):
            if step == 2 * number:
                batch.add(one)
        if step == 3:
            batch.add(request(9, "who goes away"))
        if step == 5:
            batch.abort(9)
        return step > 12 and batch.idle

    alone = {one.id: told(at_once([one]))[one.id] for one in asked}
    together = told(come_and_go, cache_tokens=160)
    assert {id: together[id] for id in alone} == alone
    assert together[9][-1] == "abort"


@pytest.mark.parametrize(("family", "at"), [("llama", 1), ("bloom", 1), ("t5", 1), ("m2m100", 1), ("m2m100", 3)])
@pytest.mark.parametrize("what", ["record", "compile"])
def test_where_one_rank_has_a_reason_all_stay_with_the_modules(family: str, at: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is left alone in the sums of a step that others do not record. Its reasons come after its own, from the `at`th on."""
    model = whole(family) if family in TRANSLATORS else of_decoder(family)
    place, times = recorded if what == "record" else compiled, 0
    made = getattr(place, what)

    def refuses(*given: Any) -> Any:
        nonlocal times
        found = made(*given)
        if threading.current_thread().name == "rank 1":
            times += 1
            if times >= at:
                raise NotRecorded("there is a reason")
        return found

    monkeypatch.setattr(place, what, refuses)

    def told(part: Any, group: Group) -> tuple[bool, str]:
        decoder = prepared(part, group)
        return decoder.program is None, decoder.why

    assert split(model, 3, told) == [(True, "on rank 1 there is a reason")] * 3


def test_a_rank_that_fails_in_the_middle_of_a_step_says_why() -> None:
    said: dict[int, str] = {}

    def told(part: Any, group: Group) -> None:
        calls = list[int]()

        def fails(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:  # the step that is recorded
                raise ValueError("in the middle")

        if group.rank == 1:
            part.decoder.block[1].layer[1].register_forward_pre_hook(fails)
        try:
            prepared(part, group)
        except RankError as error:
            said[group.rank] = str(error)
            raise

    with pytest.raises(RankError):
        split(whole("t5"), 2, told)
    assert all("ranks disagree" in text for text in said.values())
    assert said[1].startswith("rank 1: recording a step failed: ValueError: in the middle (")
