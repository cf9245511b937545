"""Parameters that files leave out since the model computes them: Marian's tables of positions, as transformers saves it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, LlamaForCausalLM

import colrow
from colrow.checkpoint import model_dir
from colrow.comm.group import Group, single
from colrow.comm.local import run_threads
from colrow.errors import UserError

from . import files
from .test_engine_translate import saved


@pytest.mark.parametrize("ranks", [1, 2])
def test_marian_as_transformers_saves_it(ranks: int, tmp_path: Any) -> None:
    folder = saved(tmp_path / "marian", "marian")
    tables = ["model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"]
    assert not set(tables) & set(model_dir.find(folder).source().tensors), "transformers leaves them out"
    whole = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.tensor([[5, 9, 200, 31, 7], [3, 3, 8, 250, 11]])
    with torch.no_grad():
        expected = whole(input_ids=ids, decoder_input_ids=ids.flip(0)).logits

    def rank(group: Group) -> torch.Tensor:
        part: Any = colrow.load(folder, group, dtype="float64", gate=False)
        for name in tables:
            entry = part.colrow.plan.tensor(name).partition
            assert torch.equal(part.get_parameter(name), entry.split(whole.get_parameter(name), group.rank)), name
            assert not part.get_parameter(name).requires_grad
        with torch.no_grad():
            return part(input_ids=ids, decoder_input_ids=ids.flip(0)).logits

    for logits in run_threads(rank, ranks) if ranks > 1 else [rank(single())]:
        assert (logits - expected).abs().max() < 1e-10


def test_a_weight_that_would_be_drawn_at_random_is_missed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = files.saved("llama", tmp_path, torch.float32)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", ["lm_head.weight", r"norm\.weight"])
    path = next(path for path, keys in _files(folder).items() if "lm_head.weight" in keys)
    _without(path, "lm_head.weight")
    with pytest.raises(UserError, match=r"no weights for 1 of the model's parameters, got lm_head.weight"):
        colrow.load(str(folder), single(), gate=False)


def _files(folder: Any) -> dict[Any, set[str]]:
    from safetensors import safe_open

    out = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            out[path] = set(file.keys())
    return out


def _without(path: Any, name: str) -> None:
    """The file, and the index beside it, without one tensor."""
    import json

    from safetensors.torch import load_file, save_file

    save_file({key: value for key, value in load_file(path).items() if key != name}, path, {"format": "pt"})
    for index in path.parent.glob("*.index.json"):
        content = json.loads(index.read_text())
        content["weight_map"].pop(name)
        index.write_text(json.dumps(content))
