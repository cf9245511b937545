"""Adapters in whole runs: trained, stopped and resumed at another number of ranks; the commands train, export and run around one."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

import colrow
from colrow.__main__ import main
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.adapters import add_adapter
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_parameters
from colrow.planning.derive import derive
from colrow.train.settings import Settings
from colrow.train.trainer import Resumed, SavedAt, Trainer

from . import tiny
from .splitting import case, whole
from .test_engine_text import byte_level
from .test_train_run import losses, rows

SETTINGS = Settings(steps=6, batch=2, accumulate=2, lr=2e-2, clip=0.5, save_every=2)
AT = case("llama-bias")


def trained(group: Group, out: Path | None, until: int | None = None, alpha: int = 8) -> tuple[list, dict[str, torch.Tensor]]:
    model = parallelize(copy.deepcopy(whole(AT).model), derive(whole(AT).config, group.size), group)
    config = LoraConfig(r=4, lora_alpha=alpha, lora_dropout=0.2, target_modules="all-linear", base_model_name_or_path="somewhere")
    add_adapter(model, config, seed=1)
    events = []
    for event in Trainer(model, rows(), SETTINGS, out).run():
        events.append(event)
        if isinstance(event, SavedAt) and event.step == until:
            break
    return events, whole_parameters(model)


def test_a_run_is_the_same_at_any_number_of_ranks_and_when_interrupted(tmp_path: Path) -> None:
    """Dropout included. A checkpoint holds what is trained, not the model."""
    (events, parameters), *_ = run_threads(trained, 1, None)
    assert losses(events)[-1] < losses(events)[0]
    run_threads(trained, 3, tmp_path, 4)
    saved = load_file(tmp_path / "checkpoints" / "step-00000004" / "rank-0-of-3.safetensors")
    assert saved
    assert all("lora_" in key for key in saved)
    (resumed, others), _ = run_threads(trained, 2, tmp_path)
    assert isinstance(resumed[0], Resumed)
    assert losses(resumed) == pytest.approx(losses(events)[4:], rel=1e-6)
    assert max(float((others[n] - p).abs().max()) for n, p in parameters.items()) <= 2e-4  # the loss is float32
    with pytest.raises(UserError, match="another adapter"):
        run_threads(trained, 2, tmp_path, None, 9)


def test_recomputation_changes_nothing() -> None:
    """... dropout of the adapter included: recomputed layers draw their masks again."""

    def task(group: Group, recompute: bool) -> dict[str, torch.Tensor]:
        model = parallelize(copy.deepcopy(whole(AT).model), derive(whole(AT).config, group.size), group)
        add_adapter(model, LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear"), seed=1)
        list(Trainer(model, rows(), Settings(**vars(SETTINGS) | {"recompute": recompute, "steps": 2})).run())
        return whole_parameters(model)

    plain, again = (run_threads(task, 2, recompute)[0] for recompute in (False, True))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def colrow_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments, "--no-gate"] if arguments[0] in ("train", "run") else list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.process
def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """train --lora on two ranks leaves an adapter that PEFT reads; export merges it; run --adapter says what the merged model says."""
    base = tmp_path / "base"
    model = tiny.whole(tiny.config("llama", vocab_size=257, eos_token_id=256), attention="sdpa").float()
    model.save_pretrained(base)
    byte_level().save_pretrained(base)
    GenerationConfig(eos_token_id=[256, 255]).save_pretrained(base)  # not what the config says
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("abababab" * 4, "cdcdcdcd" * 4)))
    run = ["train", str(base), "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "run"), "--steps", "5", "--lr", "0.05"]
    code, out, err = colrow_command(capsys, *run, "--length", "32", "--tp", "2", "--lora", "4", "--lora-targets", "q_proj,down_proj")
    assert (code, out.strip()) == (0, str(tmp_path / "run" / "adapter")), err
    code, _, err = colrow_command(capsys, "export", str(tmp_path / "run"), str(tmp_path / "merged"))
    assert code == 0, err
    ids = tiny.ids(model.config)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.generation_config.eos_token_id == [256, 255]
    torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert (merged(ids).logits - model(ids).logits).abs().max() > 0.1
    code, _, err = colrow_command(capsys, "export", str(tmp_path / "run"), str(tmp_path / "alone"), "--adapter")
    assert code == 0, err
    assert PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "alone")(ids).logits.equal(theirs(ids).logits)
    said = []
    for arguments in ([str(base), "--adapter", str(tmp_path / "run" / "adapter")], [str(tmp_path / "merged")]):
        code, text, err = colrow_command(capsys, "run", *arguments, "-p", "ab", "-n", "8")
        assert code == 0, err
        said.append(text)
    assert said[0] == said[1]


def test_an_adapter_that_is_not_there_or_not_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and exit code 2, before a weight is read."""
    base = tmp_path / "base"
    tiny.whole(tiny.config("llama")).save_pretrained(base)
    capsys.readouterr()
    code, _, err = colrow_command(capsys, "run", str(base), "-p", "a", "--adapter", str(tmp_path))
    assert code == 2
    assert err.count("\n") == 1
    assert "adapter_config.json" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = colrow_command(capsys, "train", str(base), "--data", "d", "--out", str(tmp_path / "o"), "--lora", "4")
    assert (code, err) == (2, "colrow: adapters need the package peft, which is not installed; try: pip install peft\n")
    monkeypatch.undo()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}))
    with pytest.raises(UserError, match="IA3"):
        colrow.load(str(base), colrow.comm.group.single(), adapter=tmp_path, gate=False)
