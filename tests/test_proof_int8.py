"""What verify says of int8 weights: small for what rounds little, none for what is exact in int8, large for what is broken."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from colrow.checkpoint.model_dir import find
from colrow.errors import UserError
from colrow.parallel import int8 as quantized
from colrow.planning.derive import derive
from colrow.proof import int8
from colrow.proof.verify import Task
from tests import tiny


def compared(model: torch.nn.Module, folder: Path, ranks: int) -> int8.Int8Error:
    model.save_pretrained(folder)  # type: ignore[operator]
    files = find(str(folder))
    config = files.config()
    return int8.compare("tiny", Task(files, config, derive(config, ranks), torch.float32), "threads")


@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("gpt2", 3)])
def test_the_error_of_int8_weights(family: str, ranks: int, tmp_path: Path) -> None:
    found = compared(tiny.whole(tiny.config(family), torch.float32), tmp_path, ranks)
    assert found.exit_code == 0
    assert all(replace(found, divergence=bad).exit_code == 1 for bad in (math.nan, math.inf))
    assert 0 < found.weights.error < 0.02
    assert 0 < found.typical < 0.05
    assert found.same > 0.9 * found.asked
    assert found.inside > 0
    assert "instructions in C" in found.text()


def test_weights_that_are_exact_in_int8_have_no_error(tmp_path: Path) -> None:
    """And cuts between groups are told as such."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = tiny.whole(tiny.config("llama", **sizes), torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and "embed" not in name:
                p.copy_(quantized.dequantized(*quantized.quantize(p.detach()), *p.shape, torch.float32))
    found = compared(model, tmp_path, 2)
    assert found.inside == 0
    assert found.largest < 1e-5
    assert (found.same, found.greedy) == (found.asked, int8.TOKENS)


def test_a_broken_scale_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = quantized.quantize
    monkeypatch.setattr(quantized, "quantize", lambda values: (original(values)[0], 1.5 * original(values)[1]))
    found = compared(tiny.whole(tiny.config("llama"), torch.float32), tmp_path, 2)
    assert found.weights.error > 0.4
    assert found.typical > 0.1


def test_models_that_go_on_from_no_text_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 51}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8))
    with pytest.raises(UserError, match="verify --dtype int8 needs a model that generates text"):
        compared(model, tmp_path, 2)
