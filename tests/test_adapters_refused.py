"""Adapters that a split model cannot take, and files that do not fit: refused by name, and nothing is changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, get_peft_model
from safetensors.torch import load_file, save_file

from colrow.comm.group import Group
from colrow.errors import UserError
from colrow.parallel import adapter_files
from colrow.parallel.adapter_files import load_adapter
from colrow.parallel.adapters import add_adapter

from . import tiny
from .adapting import EVERY_LINEAR, lora, reference, split
from .families import FAMILIES


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3"),
        (lora(use_dora=True), "use_dora"),
        (lora(modules_to_save=["lm_head"]), "modules_to_save"),
        (lora(init_lora_weights="olora"), "olora"),
        (lora(bias="all"), "bias"),
        (lora(target_parameters=["mlp.gate_proj.weight"]), "target_parameters"),
        (lora(target_modules=["no_such_layer"]), "no_such_layer"),
        (lora(target_modules=["norm"]), "LlamaRMSNorm"),
    ],
)
def test_refused_by_name_with_the_model_unchanged(config: Any, words: str) -> None:
    whole, _, ids, _ = reference("llama", tuple(EVERY_LINEAR))

    def task(group: Group, model: Any) -> None:
        names = [name for name, _ in model.named_parameters()]
        before = model(ids).logits
        with pytest.raises(UserError, match=words) as e:
            add_adapter(model, config)
        assert "\n" not in str(e.value)
        assert [name for name, p in model.named_parameters() if p.requires_grad] == names
        assert torch.equal(model(ids).logits, before)

    split(whole, 2, task)


def test_experts_are_refused_by_name() -> None:
    cfg = FAMILIES["mixtral"]()

    def task(group: Group, model: Any) -> None:
        with pytest.raises(UserError, match="Experts"):
            add_adapter(model, lora(target_modules=["experts"]))

    split(tiny.whole(cfg, torch.float32), 2, task)


def test_an_adapter_that_peft_added_by_itself_is_refused() -> None:
    """Its product would be added to each rank's complete sum, and untrained ones differ from rank to rank."""
    whole, _, ids, _ = reference("llama", tuple(EVERY_LINEAR))

    def task(group: Group, model: Any) -> None:
        theirs = get_peft_model(model, lora())
        with torch.no_grad(), pytest.raises(UserError, match=r"colrow\.add_adapter"):
            theirs(input_ids=ids)

    split(whole, 2, task)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    whole, peft, _, _ = reference("llama", tuple(EVERY_LINEAR))
    good = tmp_path / "good"
    peft.save_pretrained(good)
    tensors = load_file(good / adapter_files.WEIGHTS)
    name = next(iter(tensors))

    def changed(path: str, content: dict[str, torch.Tensor]) -> Path:
        shutil.copytree(good, tmp_path / path)
        save_file(content, tmp_path / path / adapter_files.WEIGHTS)
        return tmp_path / path

    rest = {key: value for key, value in tensors.items() if key != name}
    cases = {
        "lacks": changed("lacks", rest),
        "another shape": changed("shape", {**rest, name: torch.zeros(3, 3)}),
        "no place": changed("more", {**tensors, "base_model.model.another.lora_A.weight": torch.zeros(3)}),
        "adapter_config.json": tmp_path,
    }

    def task(group: Group, model: Any) -> None:
        for words, path in cases.items():
            with pytest.raises(UserError, match=words):
                load_adapter(model, path)
            assert model.colrow.adapters is None

    split(whole, 2, task)
