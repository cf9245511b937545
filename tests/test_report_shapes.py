"""The presets have the parameter counts their makers publish, and can be planned."""

from __future__ import annotations

import pytest
import torch

from colrow.errors import UserError
from colrow.planning.shapes import SHAPES, config
from colrow.planning.trace import empty_model

BILLIONS = {  # as the model cards and papers give them
    "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3-70b": 70.55, "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.09,
    "mixtral-8x7b": 46.70, "mixtral-8x22b": 140.6, "deepseek-v3": 671.0, "deepseek-v2-lite": 15.71,
}  # fmt: skip


def test_every_shape_is_here() -> None:
    assert BILLIONS.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters(name: str) -> None:
    found = sum(p.numel() for p in empty_model(config(name), "eager").parameters()) / 1e9
    assert found == pytest.approx(BILLIONS[name], rel=0.01), name
    assert config(name).dtype in ("bfloat16", torch.bfloat16)


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="llama-3-70b"):
        config("llama-9-1b")
