"""Encoder-decoders as text: the prompt is read by the encoder, the answer is the decoder's; and what the commands refuse, in one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from colrow.__main__ import main
from colrow.checkpoint.model_dir import find
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.engine.batch import Batch
from colrow.engine.engine import Engine
from colrow.engine.generate import generate
from colrow.engine.request import Output, Request
from colrow.engine.rules import rules_of
from colrow.engine.settings import Sampling
from colrow.engine.stopping import Limits
from colrow.engine.translate import start_tokens
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive
from colrow.planning.models import build
from colrow.proof.noise import add_noise
from colrow.proof.verify import verify

from .families import ENCODERS, TRANSLATORS
from .serving import served
from .test_engine_batch import answers, at_once, serve
from .test_engine_text import byte_level
from .tiny import TOKENS

PROMPTS = ["Hello there", "a", "one two three"]
NEW = 10


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def speaking(family: str, forced: int | None = None, **changes: Any) -> Any:
    """A model whose vocabulary is that of the byte-level tokenizer, and that does not stop by itself."""
    config = {**TRANSLATORS, **ENCODERS}[family]()
    for key, value in {"vocab_size": 257, "decoder_vocab_size": 257, "eos_token_id": 256, **changes}.items():
        setattr(config, key, value)
    model = build(config, dtype=torch.float32).eval()
    add_noise(model)
    if model.can_generate():
        model.generation_config.forced_bos_token_id = forced
        model.generation_config.forced_eos_token_id = None  # else generate ends what is cut off with an end token
    return model


def saved(folder: Any, family: str, **changes: Any) -> str:
    speaking(family, **changes).save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return str(folder)


def alone(model: Any, prompt: str) -> list[int]:
    """What transformers decodes greedily for one prompt."""
    ids = torch.tensor([byte_level()(prompt)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, num_beams=1)
    return out[0].tolist()[len(start_tokens(model)) :]


@pytest.mark.parametrize(("family", "ranks", "forced"), [("t5", 2, None), ("bart", 3, 7), ("umt5", 2, None), ("marian", 1, None)])
def test_every_prompt_of_a_batch_gets_what_it_would_get_alone(family: str, ranks: int, forced: int | None) -> None:
    """Prompts of several lengths: padded on the right, where the encoder's positions do not shift. `forced`: the token that some models are
    made to say first."""
    whole = speaking(family, forced)
    expected = [alone(whole, prompt) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == len(PROMPTS), "a test that tells prompts apart"
    copies = [speaking(family, forced) for _ in range(ranks)]
    plan = derive(whole.config, ranks)

    def rank(group: Group) -> list[list[int]]:
        model: Any = parallelize(copies[group.rank], plan, group) if ranks > 1 else copies[0]
        out = [list[int]() for _ in PROMPTS]
        ids = [byte_level()(prompt)["input_ids"] for prompt in PROMPTS]
        rules = rules_of(whole.generation_config, frozenset([256]))
        for step in generate(model, group, ids, Sampling(0.0), Limits(NEW, frozenset([256])), rules=rules):
            for row, token in zip(out, step.tokens, strict=True):
                row.extend([] if token is None else [token])
        return out

    for found in run_threads(rank, ranks) if ranks > 1 else [rank(single())]:
        assert found == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mask_is_as_exact_as_the_model(ranks: int) -> None:
    """ProphetNet's code multiplies it by a number that only float64 holds: NaN, where `generate` without a mask has none. Alone, and in a
    batch where it hides something."""
    sizes = {"encoder_ffn_dim": 51, "decoder_ffn_dim": 53, "max_position_embeddings": 64}
    sizes |= {f"num_{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 2), ("attention_heads", 6))}
    whole = build(tf.ProphetNetConfig(**TOKENS, **sizes, hidden_size=48, decoder_start_token_id=1), dtype=torch.float32).double().eval()
    add_noise(whole)
    for p in whole.parameters():
        p.data.mul_(3)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 3, 77]]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "num_beams": 1}
    expected = [whole.generate(torch.tensor([prompt]), **options)[0, 1:].tolist() for prompt in prompts]
    assert expected[0] != expected[1]

    def rank(group: Group) -> list[list[int | None]]:
        part = parallelize(copy.deepcopy(whole), derive(whole.config, ranks), group) if ranks > 1 else whole
        alone = [[step.tokens[0] for step in generate(part, group, [prompt], limits=Limits(NEW))] for prompt in prompts]
        together = [list(row) for row in zip(*(step.tokens for step in generate(part, group, prompts, limits=Limits(NEW))), strict=True)]
        assert together == alone
        return alone

    assert run_threads(rank, ranks) == [expected] * ranks


def request(number: int, prompt: str, **more: Any) -> Request:
    return Request(number, tuple(byte_level()(prompt)["input_ids"]), **{"max_new_tokens": NEW, **more})


@pytest.mark.parametrize(("family", "forced"), [("t5", None), ("bart", 7), ("marian", None)])
def test_many_at_once_get_what_transformers_gives_each(family: str, forced: int | None) -> None:
    """In the batch of a server: requests that come and go, pause, and read prompts longer than a step has room for."""
    prompts = [*PROMPTS, "a longer prompt than eight tokens", "Hello there"]
    requests = [request(at, prompt) for at, prompt in enumerate(prompts)]
    whole = speaking(family, forced)
    expected = {at: alone(whole, prompt) for at, prompt in enumerate(prompts)}
    for ranks in (1, 2, 3):

        def rank(group: Group) -> list[Output]:
            return serve(group, whole, at_once(requests), cache_tokens=112, max_running=4, chunk=8)

        split = run_threads(rank, ranks) if ranks > 1 else [rank(single())]
        found = answers(split[0])
        assert {at: tokens for at, (tokens, _, _) in found.items()} == expected
    gone = request(9, "who goes away"), request(10, "")

    def script(batch: Batch, step: int, outputs: list[Output]) -> bool:
        if step == 0:
            for asked in (*gone, *requests):
                batch.add(asked)
        if step == 3:
            batch.abort(9)
        return batch.idle

    found = answers(serve(single(), whole, script, fast=True))
    assert {at: found[at][0] for at in expected} == expected
    assert (found[9][2], found[10][2]) == ("abort", "error")


def test_served_over_http() -> None:
    whole = speaking("bart", 7)
    with served(whole, byte_level()) as server:
        answer = server.ask("/v1/completions", {"prompt": PROMPTS, "max_tokens": NEW, "temperature": 0})[1]
        texts = Engine(whole, single(), byte_level()).complete(PROMPTS, max_new_tokens=NEW)
        assert answer["usage"]["completion_tokens"] == sum(len(alone(whole, prompt)) for prompt in PROMPTS), "the forced one counts"
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert answer["usage"]["prompt_tokens"] == sum(len(byte_level()(prompt)["input_ids"]) for prompt in PROMPTS)
        limit = server.ask("/v1/models")[1]["data"][0]["max_model_len"]
        assert limit == whole.config.max_position_embeddings
        full = {"prompt": "x" * limit, "max_tokens": 1, "temperature": 0}
        assert server.ask("/v1/completions", full)[0] == 200, "the answer has a length of its own"
        status, body = server.ask("/v1/completions", {**full, "prompt": "x" * (limit + 1)})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        long = server.ask("/v1/completions", {**full, "max_tokens": 1000, "ignore_eos": True})[1]
        assert long["usage"]["completion_tokens"] == limit - 1
        status, body = server.ask("/v1/completions", {**full, "echo": True, "logprobs": 1})
        assert (status, body["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_batch_in_bfloat16(family: str) -> None:
    """In which pieces of other models' prompts are joined, where the processor has products of bfloat16 pairs."""
    whole = speaking(family).to(torch.bfloat16)
    found = answers(serve(single(), whole, at_once([request(0, PROMPTS[0])])))
    assert [found[0][1]] == Engine(whole, single(), byte_level()).complete([PROMPTS[0]], max_new_tokens=NEW)
    assert len(found[0][0]) == NEW


def test_generate_of_a_split_model_is_transformers_own() -> None:
    whole = speaking("t5")
    ids = torch.tensor([[5, 9, 2, 7], [3, 3, 8, 1]])
    expected = whole.generate(ids, max_new_tokens=6, num_beams=2, do_sample=False)
    copies = [speaking("t5") for _ in range(3)]
    plan = derive(whole.config, 3)
    found = run_threads(lambda g: parallelize(copies[g.rank], plan, g).generate(ids, max_new_tokens=6, num_beams=2, do_sample=False), 3)  # type: ignore[operator]
    assert all(torch.equal(one, expected) for one in found)


def test_run_and_verify(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "t5", "t5")
    assert main(["run", folder, "-p", "Hello there", "-n", str(NEW)]) == 0
    said = capsys.readouterr().out
    expected = Engine(speaking("t5"), single(), byte_level()).complete(["Hello there"], max_new_tokens=NEW)
    assert said.strip("\n") == expected[0].strip("\n")
    for family in ("bart", "whisper", "clip"):
        report = verify(find(saved(tmp_path / family, family) if family != "clip" else _clip(tmp_path)), 2, backend="threads")
        assert report.equal, report.text()


def _clip(folder: Any) -> str:
    speaking("clip").save_pretrained(folder / "clip")
    return str(folder / "clip")


@pytest.mark.parametrize(
    ("family", "command", "said"),
    [
        ("bert", ["run", "-p", "x"], "run needs a model that generates text, got BertForMaskedLM"),
        ("whisper", ["run", "-p", "x"], "this one takes input_features"),
        ("t5", ["chat"], "chat needs a decoder alone"),
        ("t5", ["verify", "--stream"], "verify --stream needs a decoder alone"),
        ("vit", ["plan", "--html", "p.html"], "which this model does not"),
        ("bart", ["plan", "--train"], "plan --train needs a decoder alone"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    family: str, command: list[str], said: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / family, family)
    assert main([command[0], folder, *command[1:]]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("colrow: ")]
    assert said in line


def test_a_plan_of_an_encoder_says_what_a_pass_moves(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", saved(tmp_path / "vit", "vit"), "--tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "collectives of" in said
    assert "tokens/s" not in said


def test_a_decoder_that_has_no_first_token_is_refused() -> None:
    model = speaking("t5", decoder_start_token_id=None, bos_token_id=None)
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(UserError, match="decoder starts with"):
        Engine(model, single(), byte_level()).complete(["a"], max_new_tokens=1)
