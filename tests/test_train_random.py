"""Random numbers do not depend on the number of ranks: dropout (report O-34), first weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel import build, random
from colrow.parallel.collect import whole_gradients, whole_parameters
from colrow.parallel.initialize import initialize
from colrow.planning.derive import derive

from . import tiny
from .splitting import TOLERANCE, ask_split, case, next_token_loss, whole

DROPPING = case("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
RANKS = (1, 2, 4)


def trained(model: Any, ids: torch.Tensor, steps: int = 2) -> dict[str, torch.Tensor]:
    """Losses and the gradients of several passes in training mode, the second with other masks than the first."""
    model.train()
    random.seed_dropout(model, 7)
    losses = [next_token_loss(model(ids).logits, ids) for _ in range(steps)]
    torch.stack(losses).sum().backward()
    return {f"loss {i}": loss.detach() for i, loss in enumerate(losses)} | whole_gradients(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_o34_training_with_dropout_is_the_same_at_any_number_of_ranks(attention: str) -> None:
    """GPT-2, 9 heads (5 and 4; 3, 2, 2, 2): loss and every gradient, fused kernels (which draw for themselves) included."""
    at = whole(DROPPING, attention)
    one, *others = [ask_split(at, derive(at.config, n), lambda group, model: trained(model, at.ids)) for n in RANKS]
    assert (one[0]["loss 0"] - one[0]["loss 1"]).abs() > 1e-3, "each pass has masks of its own"
    assert abs(one[0]["loss 0"] - at.answers.tensors["loss"]) > 1e-3, "something is dropped"
    for results in others:
        for result in results:
            assert result.keys() == one[0].keys()
            for name, tensor in result.items():
                assert (tensor - one[0][name]).abs().max() <= TOLERANCE, name


def test_o34_the_residual_stream_is_equal_and_the_heads_masks_differ() -> None:
    at = whole(DROPPING)

    def task(group: Group, model: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        seen: list[torch.Tensor] = []
        drawn: list[torch.Tensor] = []
        for block in model.transformer.h:
            block.register_forward_hook(lambda _, __, out: seen.append(out if isinstance(out, torch.Tensor) else out[0]))
        original = random._Dropping.mask
        random.seed_dropout(model.train(), 3)
        model(at.ids)
        mode = random._Dropping(model.colrow.masks, "transformer.h.0.attn", 1)
        width = model.colrow.plan.attention[0].query.local_size(group.rank)
        drawn.append(original(mode, torch.empty(2, width, 12, 12), 0.5, model.colrow.masks.sites["transformer.h.0.attn"][0]))
        return seen, drawn[0]

    (first, mine), (second, theirs) = ask_split(at, derive(at.config, 2), task)
    assert len(first) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    heads = torch.cat([mine, theirs], 1).transpose(0, 1).flatten(1)
    assert len({tuple(head.tolist()) for head in heads}) == 9, "every head has its own mask"
    assert abs(float((heads == 0).double().mean()) - 0.5) < 0.05
    assert set(heads.unique().tolist()) == {0.0, 2.0}, "what is kept is scaled up"


def test_o34_one_seed_for_all_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where each rank numbers its own heads from 0."""
    at = whole(DROPPING)
    right = ask_split(at, derive(at.config, 1), lambda group, model: trained(model, at.ids))[0]
    original = random._Dropping.mask

    def wrong(self: Any, x: torch.Tensor, p: float, site: Any) -> torch.Tensor:
        return original(self, x, p, random.Site(None, site.dims))

    monkeypatch.setattr(random._Dropping, "mask", wrong)
    found = ask_split(at, derive(at.config, 2), lambda group, model: trained(model, at.ids))[0]
    assert (found["loss 0"] - right["loss 0"]).abs() > 1e-3


def test_dropout_on_mlp_features_and_in_three_kinds_of_attention() -> None:
    """T5: encoder, decoder and cross attention; a Dropout module between the MLP's two products."""
    sizes = {"d_model": 40, "d_kv": 8, "num_heads": 6, "d_ff": 96, "num_layers": 2, "dropout_rate": 0.3}
    config = T5Config(vocab_size=101, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config).double()
    tiny.add_noise(model)
    ids = tiny.ids(config)
    copies = {n: [copy.deepcopy(model) for _ in range(n)] for n in (1, 2)}

    def task(group: Group) -> torch.Tensor:
        split = build.parallelize(copies[group.size][group.rank], derive(config, group.size), group).train()
        random.seed_dropout(split, 1)
        return split(input_ids=ids, decoder_input_ids=ids).logits.detach()

    one, (two, _) = run_threads(task, 1)[0], run_threads(task, 2)
    assert (one - two).abs().max() <= TOLERANCE
    assert (one - model.eval()(input_ids=ids, decoder_input_ids=ids).logits).abs().max() > 1e-2


def test_recomputation_draws_the_same_masks() -> None:
    at = whole(DROPPING)

    def task(group: Group, model: Any, recompute: bool) -> dict[str, torch.Tensor]:
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return trained(model, at.ids)

    plan = derive(at.config, 2)
    plain = ask_split(at, plan, lambda group, model: task(group, model, False))[0]
    again = ask_split(at, plan, lambda group, model: task(group, model, True))[0]
    for name, tensor in plain.items():
        assert (tensor - again[name]).abs().max() <= TOLERANCE, name


def test_recomputation_that_cannot_be_told_what_it_repeats_is_refused() -> None:
    at = whole(DROPPING)

    def task(group: Group, model: Any) -> None:
        model.activation_checkpointing_enable({"use_reentrant": True})
        trained(model, at.ids)

    with pytest.raises(UserError, match="recomputed"):
        ask_split(at, derive(at.config, 2), task)


def test_rates_may_change_and_evaluation_drops_nothing() -> None:
    at = whole(DROPPING, "sdpa")

    def task(group: Group, model: Any) -> None:
        model.train()
        model(at.ids)
        assert model.config._attn_implementation == "eager"
        model.eval()
        assert (model(at.ids).logits - at.answers.tensors["logits"]).abs().max() <= TOLERANCE
        assert model.config._attn_implementation == "sdpa"
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        assert (model(at.ids).logits - at.answers.tensors["logits"]).abs().max() <= TOLERANCE

    ask_split(at, derive(at.config, 2), task)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_first_weights_are_the_same_for_any_number_of_ranks(family: str) -> None:
    config = tiny.config(family)

    def task(group: Group, seed: int) -> dict[str, torch.Tensor]:
        model = build.split(build.empty(config, torch.float32), derive(config, group.size), group)
        initialize(model, seed)
        return whole_parameters(model)

    first = run_threads(task, 1, 5)[0]
    for ranks in (2, 3):
        for name, tensor in run_threads(task, ranks, 5)[0].items():
            assert torch.equal(tensor, first[name]), name
    assert any(not torch.equal(tensor, first[name]) for name, tensor in run_threads(task, 1, 6)[0].items())
    norm, projection = ("model.norm", "mlp.down_proj") if family != "gpt2" else ("transformer.ln_f", "attn.c_proj")
    assert torch.equal(first[f"{norm}.weight"], torch.ones_like(first[f"{norm}.weight"]))
    std = config.initializer_range / (2 * 2) ** 0.5 if family == "gpt2" else config.initializer_range  # GPT-2 scales by depth
    drawn = torch.cat([t.flatten() for n, t in first.items() if n.endswith(f"{projection}.weight")])
    assert abs(float(drawn.std()) / std - 1) < 0.1


def test_layers_left_out_by_chance_are_refused() -> None:
    at = whole(case("llama"))

    def task(group: Group, model: Any) -> None:
        model.model.layerdrop = 0.1
        with pytest.raises(UserError, match="layerdrop"):
            model.train()(at.ids)

    ask_split(at, derive(at.config, 2), task)
