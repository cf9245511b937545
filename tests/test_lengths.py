"""Sizes that follow those of the inputs otherwise than one to one, and what else a prediction must know of an architecture: the gate counts
every collective of the real applier against it, for inputs of another length than the traced one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import transformers as tf
from transformers import PreTrainedConfig

from colrow.planning import lengths
from colrow.planning.derive import derive
from colrow.planning.plan import Plan, Region
from colrow.proof.gate import prove
from colrow.proof.shrink import Small

from .families import PICTURES, PLAIN, TWO_SIDED

WINDOW = 4

CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "padded to windows, and cut off again": lambda: tf.LongformerConfig(**PLAIN, attention_window=[WINDOW] * 2),
    "padded to windows, where none is missing": lambda: tf.LEDConfig(
        **TWO_SIDED, attention_window=[2 * WINDOW] * 2, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64
    ),
    "one module on two lengths": lambda: tf.PegasusXConfig(
        **TWO_SIDED, max_position_embeddings=64, num_global_tokens=5, block_size=12, stagger_local_blocks=False
    ),
    "a picture before the text": lambda: tf.GitConfig(**PLAIN, vision_config={"hidden_size": 48, **PICTURES, "num_attention_heads": 6}),
    "pooled, and given to a module as key and as value": lambda: tf.FunnelConfig(
        **{k: v for k, v in PLAIN.items() if k in ("vocab_size", "pad_token_id")},
        block_sizes=[1, 1, 1],
        num_decoder_layers=1,
        d_model=40,
        n_head=9,
        d_head=8,
        d_inner=51,
    ),
    "a frozen table": lambda: tf.RoFormerConfig(**PLAIN, embedding_size=48),
    "means of a fused norm, which nobody reads": lambda: tf.RemBertConfig(**PLAIN, input_embedding_size=24, output_embedding_size=40),
}


def at(plan: Plan, module: str, op: str = "reduce") -> Region:
    return next(r for r in plan.regions if (r.module, r.op) == (module, op))


@pytest.mark.parametrize("case", CASES)
def test_counted_as_predicted(case: str) -> None:
    config = CASES[case]()
    plan = derive(config, 2)
    assert prove(Small(config, plan, ())).ok
    assert Plan.from_json(plan.to_json()) == plan


def test_lengths_are_those_of_the_models_code() -> None:
    plan = derive(CASES["padded to windows, and cut off again"](), 2)
    inner, logits = at(plan, "longformer.encoder.layer.0.output.dense"), at(plan, "", "gather")
    assert [lengths.value(inner.shape[1], {"S": n}) * int(inner.shape[2]) for n in (3, 4, 13)] == [4, 4, 16]
    assert logits.shape == ("B", "S", 101)
    plan = derive(CASES["a picture before the text"](), 2)
    assert at(plan, "git.encoder.layer.1.output.dense").shape == ("B", ("+", "S", 17), 48)


def test_a_module_that_runs_on_two_lengths_has_both() -> None:
    region = at(derive(CASES["one module on two lengths"](), 2), "model.encoder.layers.0.fc2")
    assert (region.calls, region.further) == (1, (("B", 5, 48),))


def test_a_tensor_that_a_module_is_given_twice_has_f_under_both_names() -> None:
    plan = derive(CASES["pooled, and given to a module as key and as value"](), 2)
    found = [r for r in plan.regions if r.module == "funnel.encoder.blocks.2.0.attention" and r.op == "copy"]
    assert [(r.arg, r.shares) for r in found] == [("key", ""), ("value", found[0].name)]
    assert [[lengths.value(r.shape[1], {"S": n}) for n in (7, 13, 14)] for r in found] == [[4, 7, 7]] * 2
    pooled = at(plan, "funnel.encoder.blocks.1.0.ffn.linear_2")
    assert [lengths.value(pooled.shape[1], {"S": n}) for n in (7, 13, 14)] == [4, 7, 7]


def test_lengths_in_words_and_numbers() -> None:
    length: Any = lengths.total(["S", 3, lengths.product(["B", 2, 3])])
    assert lengths.text(length) == "((S + (B * 6)) + 3)"
    assert lengths.value(length, {"S": 7, "B": 2}) == 22
    assert lengths.total([3, 4]) == 7
    assert lengths.product([]) == 1
    assert json.loads(json.dumps(length)) == ["+", ["+", "S", ["*", "B", 6]], 3]
