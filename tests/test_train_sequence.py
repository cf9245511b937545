"""Sequence parallelism is the same model: loss, every gradient; the collectives it costs; dropout, recomputation, decoding.
Steps of the optimizer, and all degrees: test_train_equality.py."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
)

from colrow.checkpoint import model_dir
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel import build, random, sequence_probe
from colrow.parallel.collect import whole_gradients
from colrow.parallel.head import sharded_logits
from colrow.parallel.sequence import Sequence
from colrow.planning.derive import derive
from colrow.planning.plan import Plan
from colrow.planning.sequence import Cut
from colrow.proof import gate
from colrow.proof.counts import counted, predicted
from colrow.proof.exercise import Questions
from colrow.proof.precision import Float64
from colrow.proof.verify import verify

from . import families, tiny
from .splitting import TOLERANCE, decode, next_token_loss

SIZES: dict[str, Any] = {**tiny.GROUPED, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
PLAIN = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
FAMILIES: dict[str, Any] = {
    **{name: functools.partial(tiny.config, name) for name in tiny.FAMILIES},
    "mistral": lambda: MistralConfig(**SIZES),
    "llama-one-kv-head": lambda: tiny.config("llama", num_key_value_heads=1),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES, query_pre_attn_scalar=8, sliding_window=4),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=4),
    "phi": lambda: PhiConfig(**PLAIN),
    "phi3": lambda: Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "cohere": lambda: CohereConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "gpt-neox": lambda: GPTNeoXConfig(**PLAIN),
    "opt": lambda: OPTConfig(**tiny.TOKENS, hidden_size=48, ffn_dim=51, num_hidden_layers=2, num_attention_heads=6, dropout=0.0),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "olmo2": lambda: Olmo2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "gpt-j": lambda: GPTJConfig(**tiny.TOKENS, n_embd=48, n_head=6, n_layer=2, n_inner=51, rotary_dim=4, n_positions=64, resid_pdrop=0.0),
}


@functools.cache
def setting(family: str) -> tuple[PreTrainedConfig, Any]:
    config = FAMILIES[family]()
    model = tiny.whole(config)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the only one that knows float64
    return config, model


@functools.cache
def plan_for(family: str, ranks: int) -> Plan:
    return derive(setting(family)[0], ranks)


@functools.cache
def reference(family: str, length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    config, model = setting(family)
    ids, model = tiny.ids(config, length=length), copy.deepcopy(model)
    with Float64():
        loss = next_token_loss(model(ids).logits, ids)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def on_ranks(family: str, ranks: int, mode: str, task: Any) -> list[Any]:
    copies = [copy.deepcopy(setting(family)[1]) for _ in range(ranks)]
    plan = plan_for(family, ranks)
    return run_threads(lambda group: task(group, build.parallelize(copies[group.rank], plan, group, mode)), ranks)


def grads(group: Group, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with Float64():
        loss = next_token_loss(model(ids).logits, ids)
        loss.backward()
    whole = {n: p.grad for n, p in model.named_parameters() if model.colrow.plan.tensor(n).partition.is_whole}
    return loss.detach(), whole_gradients(model), whole


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_the_whole_models(family: str, ranks: int) -> None:
    """Lengths 12 and 13 (and 2: with 3 ranks one has no position at all); whole parameters bit-equal on all ranks."""
    for length in (12, 13) if family == "mixtral" else (12, 13, 2):  # experts need a position on every rank
        expected, gradients = reference(family, length)
        results = on_ranks(family, ranks, "again", lambda g, m: grads(g, m, tiny.ids(setting(family)[0], length=length)))  # noqa: B023
        for loss, found, whole in results:
            assert abs(loss - expected) <= TOLERANCE
            for name, grad in gradients.items():
                if grad is not None:
                    assert (found[name] - grad).abs().max() <= TOLERANCE, (length, name)
            assert all(grad is None or torch.equal(grad, results[0][2][name]) for name, grad in whole.items())


@pytest.mark.parametrize("mode", ["again", "keep"])
@pytest.mark.parametrize("family", ["llama", "llama-bias", "gpt2", "qwen3"])
def test_collectives_of_a_block(family: str, mode: str) -> None:
    """Forward 2 + 2, backward 2 reduce-scatters and 2 all-gathers, 4 where gathered inputs are gathered again; no activation is reduced."""
    ids = tiny.ids(setting(family)[0])

    def task(group: Group, model: Any) -> Counter[tuple[str, str]]:
        group.counters.reset()
        group.counters.phase = "forward"
        loss = next_token_loss(model(ids).logits, ids)
        group.counters.phase = "backward"
        loss.backward()
        group.counters.phase = ""
        at = "h.1." if family == "gpt2" else "layers.1."
        out: Counter[tuple[str, str]] = Counter()
        for (phase, op, name), tally in group.counters.sites.items():
            if at in name and not name.endswith(("weight.grad", "bias.grad", "copies.grad")):
                out[phase, op] += tally.calls
        return out

    for found in on_ranks(family, 3, mode, task):
        assert found == {
            ("forward", "all_gather"): 2,
            ("forward", "reduce_scatter"): 2,
            ("backward", "all_gather"): 4 if mode == "again" else 2,
            ("backward", "reduce_scatter"): 2,
        }


def test_a_parallel_block_gathers_once() -> None:
    """Phi: attention and MLP share one gather, and one reduce-scatter backward."""
    ids = tiny.ids(setting("phi")[0])

    def task(group: Group, model: Any) -> list[tuple[str, str]]:
        group.counters.reset()
        next_token_loss(model(ids).logits, ids).backward()
        return [(op, name) for (_, op, name) in group.counters.sites if name.startswith("model.layers.1.input_layernorm.output")]

    norm = "model.layers.1.input_layernorm.output"
    assert on_ranks("phi", 2, "keep", task)[0] == [("all_gather", norm), ("reduce_scatter", f"{norm}.grad")]


def test_o30_norm_gradients_that_are_not_summed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_probe, "with_partial_gradients", lambda plan, names: plan)
    _, gradients = reference("llama-bias", 13)
    ids = tiny.ids(setting("llama-bias")[0], length=13)
    found = on_ranks("llama-bias", 2, "again", lambda g, m: grads(g, m, ids))[0][1]
    wrong = {name for name, grad in gradients.items() if (found[name] - grad).abs().max() > 1e-6}
    expected = {n for n in gradients if "norm" in n or n.endswith(("o_proj.bias", "down_proj.bias"))}
    assert wrong == expected


def test_decoding_and_evaluation_do_not_cut_the_sequence() -> None:
    config, model = setting("llama")
    ids = tiny.ids(config)
    expected = decode(model, ids)

    def task(group: Group, split: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        group.counters.reset()
        with torch.no_grad():
            logits, tokens = decode(split, ids)
        return logits, tokens, group.counters.total("reduce_scatter").calls

    for logits, tokens, calls in on_ranks("llama", 2, "again", task):
        assert (logits - expected[0]).abs().max() <= TOLERANCE
        assert torch.equal(tokens, expected[1])
        assert calls == 0


def dropping(group: Group, model: Any, ids: torch.Tensor, recompute: bool) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    model.train()
    random.seed_dropout(model, 5)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    first, second = (model(ids[:, :n], use_cache=False).logits for n in (12, 9))
    (next_token_loss(first, ids[:, :12]) + next_token_loss(second, ids[:, :9])).backward()
    return whole_gradients(model)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_and_recomputation(recompute: bool) -> None:
    """The masks of the unsplit model, cut along the sequence; two passes of other lengths are recomputed after both have run."""
    ids = tiny.ids(setting("gpt2")[0])
    expected = on_ranks("gpt2", 1, "off", lambda g, m: dropping(g, m, ids, False))[0]
    for mode in ("again", "keep"):
        for found in on_ranks("gpt2", 3, mode, lambda g, m: dropping(g, m, ids, recompute)):
            for name, grad in expected.items():
                assert (found[name] - grad).abs().max() <= TOLERANCE, (mode, name)


def test_what_it_keeps_for_the_backward_pass_shrinks() -> None:
    """Elements saved by autograd in a pass on 4 ranks: least where gathered inputs are gathered again."""
    ids = tiny.ids(setting("gpt-neox")[0], length=32)

    def task(group: Group, model: Any) -> int:
        seen: dict[int, int] = {}

        def pack(saved: torch.Tensor) -> torch.Tensor:
            seen[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            kept = model.gpt_neox(ids).last_hidden_state
        assert kept is not None
        return sum(size for at, size in seen.items() if at not in parameters)

    plain, keep = (on_ranks("gpt-neox", 4, mode, task)[0] for mode in ("off", "keep"))
    assert keep < plain


def test_models_that_it_does_not_fit_are_refused() -> None:
    config = T5Config(d_model=40, d_kv=8, num_heads=6, d_ff=96, num_layers=2, vocab_size=101, decoder_start_token_id=0)
    plan = derive(config, 2)

    def task(group: Group) -> None:
        build.split(build.empty(config, torch.float32), plan, group, "again")

    with pytest.raises(UserError, match="decoders and encoders alone"):
        run_threads(task, 2)
    config = LlamaConfig(**SIZES | {"num_attention_heads": 1, "num_key_value_heads": 1})
    plan = derive(config, 2)
    assert not plan.attention, "one head: attention stays whole"
    with pytest.raises(UserError, match="sequence parallelism needs"):
        run_threads(task, 2)


def test_experts_need_a_position_on_every_rank() -> None:
    def task(group: Group) -> None:
        Sequence(group, Cut(frozenset(), "layers.0", "", again=True), routed=True).enter(torch.zeros(1, 2, 4))

    with pytest.raises(UserError, match="2 positions leaves one of 3 ranks without any"):
        run_threads(task, 3)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UserError, match="no such mode"):
        on_ranks("llama", 2, "on", lambda g, m: None)


def test_the_zoo_is_of_causal_models() -> None:
    assert len(FAMILIES) >= 12
    assert all(type(make()) in AutoModelForCausalLM._model_mapping for make in FAMILIES.values())


@pytest.mark.parametrize(("ranks", "mode"), [(3, "again"), (2, "keep")])
@pytest.mark.parametrize("family", FAMILIES)
def test_collectives_and_bytes_are_those_predicted(family: str, ranks: int, mode: str) -> None:
    """Every call site of a training step, 13 tokens over 2 and 3 ranks: calls, bytes of the tensor, bytes that each rank moved."""
    ids = tiny.ids(setting(family)[0], length=13)

    def task(group: Group, model: Any) -> tuple[Any, Any]:
        asked = Questions({"input_ids": ids}, ids, {"input_ids": ids[:1]}, 0)
        group.counters.reset()
        group.counters.phase = "train_forward"
        with Float64(), sharded_logits(model):
            loss = model(ids, labels=ids).loss
            group.counters.phase = "train_backward"
            loss.backward()
        group.counters.phase = ""
        expected = predicted(model.colrow.plan, asked, group, 8, model.colrow.sequence.cut)
        return {site: n for site, n in expected.items() if site[0] != "prefill"}, counted(group)

    for expected, found in on_ranks(family, ranks, mode, task):
        assert found == expected


@pytest.mark.parametrize("family", ["llama-bias", "gpt2", "mixtral"])
def test_the_gate_proves_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = setting(family)[0]
    passed = gate.gate(config, plan_for(family, 3), cache=False, sequence="again")
    assert passed.comparison.ok
    monkeypatch.setattr(sequence_probe, "with_partial_gradients", lambda plan, names: plan)
    with pytest.raises(gate.GateRefused, match=r"differs from the whole.*(norm|ln_)"):
        gate.gate(config, plan_for(family, 3), cache=False, sequence="again")


def test_what_nothing_keeps_is_not_gathered_again() -> None:
    """Falcon-H1 multiplies what its norm makes by a number for each mixer: the products are kept, what was gathered is not."""
    config = families.FAMILIES["falcon-h1"]()
    plan = derive(config, 2)
    assert [r.name for r in plan.regions if not r.kept] == [f"model.layers.{i}.input_layernorm.output" for i in (0, 1)]
    assert gate.gate(config, plan, cache=False, sequence="again").comparison.ok


def test_verify_with_it(tmp_path: Any) -> None:
    """The command's proof with real weights of a file, ranks as threads: equal, and the collectives are those of slices."""
    setting("llama")[1].save_pretrained(tmp_path / "m")
    report = verify(model_dir.find(str(tmp_path / "m")), 2, backend="threads", sequence="again")
    assert report.equal, report.text()
    assert report.title.endswith("sequence parallel in training")
    with pytest.raises(UserError, match="in training only"):
        verify(model_dir.find(str(tmp_path / "m")), 2, backend="threads", sequence="again", train=False)


@pytest.mark.parametrize(("family", "mode"), [("llama-bias", "again"), ("gpt2", "keep"), ("phi", "again")])
def test_verify_layer_by_layer_with_it(family: str, mode: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit on slices of the sequence, beside the whole one on all of it; norms whose gradients are not summed are seen."""
    setting(family)[1].save_pretrained(tmp_path / "m")
    files = model_dir.find(str(tmp_path / "m"))
    report = verify(files, 3, backend="threads", sequence=mode, stream=True)
    assert report.equal, report.text()
    assert "sequence parallel" in report.title
    monkeypatch.setattr(sequence_probe, "with_partial_gradients", lambda plan, names: plan)
    assert not verify(files, 3, backend="threads", sequence=mode, stream=True).equal
