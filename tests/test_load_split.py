"""From files to logits: ranks that read their own slices compute what transformers' whole model computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from colrow.checkpoint import model_dir
from colrow.comm.local import run_threads
from colrow.parallel import build, load

from . import files, tiny
from .hand_plans import hand_plan


def loaded(group, found: model_dir.ModelFiles, dtype: torch.dtype):
    config = found.config()
    model = build.split(build.empty(config, dtype), hand_plan(config, group.size), group)
    load.from_source(model, found.source(), dtype)
    return model.eval()


def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """In float64, unlike transformers' own."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def step(group, found, dtype, ids):
    """Logits, greedy tokens from the cache, and the gradients of what the rank holds."""
    model = loaded(group, found, dtype)
    with torch.no_grad():
        cached = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    logits = model(ids).logits
    loss(logits, ids).backward()
    return logits.detach(), cached, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_tokens_and_gradients(family, ranks, tmp_path):
    folder, _ = files.saved(family, tmp_path, torch.float64)
    found = model_dir.find(str(folder))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()  # eager rounds to float32
    ids = tiny.ids(whole.config)
    with torch.no_grad():
        tokens = whole.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = whole(ids).logits
    loss(expected, ids).backward()
    plan = hand_plan(whole.config, ranks)
    tolerance = 1e-10 if family == "gpt2" else 1e-7  # Llama's norm is computed in float32
    results = run_threads(step, ranks, found, torch.float64, ids)
    for rank, (logits, cached, grads) in enumerate(results):
        assert (logits - expected).abs().max() < tolerance
        assert torch.equal(cached, tokens)
        for name, p in whole.named_parameters():
            piece = plan.tensor(name).partition.split(p.grad, rank)
            assert (grads[name] - piece).abs().max() < tolerance, name


def test_demo_in_two():
    """5 and 4 query heads; the logits are those of the same file on one rank."""
    found = files.demo()
    ids = found.tokenizer()("The capital of France is", return_tensors="pt")["input_ids"]

    def logits(group):
        with torch.no_grad():
            return loaded(group, found, torch.float32)(ids).logits

    (one,) = run_threads(logits, 1)
    for two in run_threads(logits, 2):
        assert (two - one).abs().max() < 1e-3 * one.abs().max()
    assert found.tokenizer().decode(one[0, -1].argmax()) == " Paris"
