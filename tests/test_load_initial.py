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
from colrow.proof.verify import verify
from colrow.train import checkpoint
from colrow.train.export import export
from colrow.train.gradients import trainable

from . import files
from .test_engine_translate import saved, speaking
from .test_train_checkpoint import contents


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_of_marian_is_what_the_whole_writes(ranks: int, tmp_path: Any) -> None:
    """A checkpoint in training, exported, and the split model's own save_pretrained: both leave the tables out again."""
    model = speaking("marian")
    model.final_logits_bias.normal_()  # a buffer that files hold, cut like the vocabulary
    model.save_pretrained(folder := tmp_path / "marian")

    def rank(group: Group) -> None:
        part: Any = colrow.load(str(folder), group, dtype="bfloat16", gate=False)
        assert not any("embed_positions" in name for name in trainable(part)), "nothing trains them"
        checkpoint.save(tmp_path / "c", 1, part, trainable(part), None)
        part.save_pretrained(tmp_path / "saved")

    if ranks == 1:
        rank(single())
    else:
        run_threads(rank, ranks)
    export(tmp_path / "c", tmp_path / "exported")
    AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "whole")
    assert contents(tmp_path / "exported") == contents(tmp_path / "whole")
    assert contents(tmp_path / "saved") == contents(tmp_path / "whole")


def test_marian_is_verified_from_such_files(tmp_path: Any) -> None:
    report = verify(model_dir.find(saved(tmp_path / "marian", "marian")), 2, backend="threads")
    assert report.equal, report.text()


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
