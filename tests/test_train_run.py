"""Whole runs: the trainer at several numbers of ranks, stopped and resumed; the commands train and export in real processes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from colrow.checkpoint.model_dir import ModelFiles
from colrow.cli.options import check_training_files
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.parallel.collect import whole_parameters
from colrow.planning.derive import derive
from colrow.train.data import Row, window
from colrow.train.settings import Settings
from colrow.train.trainer import Evaluation, NotFinite, Resumed, SavedAt, Step, Trainer

from . import tiny
from .splitting import case, whole
from .test_engine_text import byte_level

SETTINGS = Settings(steps=6, batch=2, accumulate=2, lr=5e-3, warmup=2, clip=0.5, evaluate_every=3, save_every=2)
AT = case("gpt2", resid_pdrop=0.1, attn_pdrop=0.1)


def rows(count: int = 10) -> list[Row]:
    draw = torch.Generator().manual_seed(2)
    out = []
    for n in range(count):
        ids = tuple(torch.randint(3, 101, (5 + n % 4,), generator=draw).tolist())
        out.append(Row(ids, ids, tuple(range(len(ids)))))
    return out


def trained(group: Group, out: Path | None, settings: Settings = SETTINGS, until: int | None = None) -> tuple[list[Any], dict]:
    """Events and final parameters, in float32. `until`: stopped after so many steps, as a kill would."""
    model = parallelize(copy.deepcopy(whole(AT, "sdpa").model).float(), derive(whole(AT, "sdpa").config, group.size), group)
    trainer = Trainer(model, rows(), settings, out, evaluation=rows(3))
    events = []
    for event in trainer.run():
        events.append(event)
        if isinstance(event, SavedAt) and event.step == until:
            break
    return events, whole_parameters(model)


def losses(events: list[Any]) -> list[float]:
    return [e.loss for e in events if isinstance(e, Step)]


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of parameters that differ. The middle third of q|k|v's bias does not count: softmax does not see a key's bias, so its gradient
    is 0 but for rounding, of which AdamW makes steps of full size."""
    out = []
    for name, p in expected.items():
        difference = (found[name] - p).abs()
        if name.endswith("c_attn.bias"):
            third = len(p) // 3
            difference = torch.cat([difference[:third], difference[2 * third :]])
        if difference.max() >= 1e-4:
            out.append(name)
    return out


def test_a_run_is_the_same_at_any_number_of_ranks_and_when_interrupted(tmp_path: Path) -> None:
    """With dropout, accumulation, clipping, a schedule and a last window that is not full; 2 ranks go on where 3 were stopped."""
    (events, parameters), *_ = run_threads(trained, 1, None)
    assert [type(e) for e in events].count(Evaluation) == 2
    assert losses(events)[-1] < losses(events)[0]
    for found, others in run_threads(trained, 2, None):
        assert losses(found) == pytest.approx(losses(events), rel=1e-4)
        assert far(others, parameters) == []
    run_threads(trained, 3, tmp_path, SETTINGS, 4)
    (resumed, others), _ = run_threads(trained, 2, tmp_path)
    assert isinstance(resumed[0], Resumed)
    assert resumed[0].step == 4
    assert losses(resumed) == pytest.approx(losses(events)[4:], rel=1e-4)
    assert far(others, parameters) == []


def test_recomputation_changes_nothing() -> None:
    plain, again = (run_threads(trained, 2, None, Settings(**vars(SETTINGS) | {"recompute": r, "steps": 3}))[0][1] for r in (False, True))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_terms_of_the_loss_are_in_the_steps_and_not_in_the_evaluation() -> None:
    settings, at = Settings(steps=1, batch=2, accumulate=2, smoothing=0.1, z_loss=0.3), whole(case("gpt2"))
    model, read = copy.deepcopy(at.model), window(rows(), 0, 4, settings.seed)
    logits = torch.cat([model(torch.tensor([row.ids])).logits[0, :-1] for row in read])
    labels = torch.tensor([label for row in read for label in row.ids[1:]])
    plain = F.cross_entropy(logits, labels).item()
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1) + 0.3 * logits.logsumexp(-1).square().mean()
    expected.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))

    def task(group: Group) -> tuple[float, float, float]:
        part = parallelize(copy.deepcopy(at.model), derive(at.config, group.size), group)
        trainer = Trainer(part, rows(), settings, evaluation=read)
        evaluation, step = trainer.evaluate(), trainer.one_step()
        return evaluation.loss, step.loss, step.norm

    for ranks in (1, 2):
        for found in run_threads(task, ranks):
            assert found == pytest.approx((plain, expected.item(), norm), abs=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_module(ranks: int) -> None:
    def task(group: Group) -> None:
        model = parallelize(copy.deepcopy(whole(AT).model).float(), derive(whole(AT).config, group.size), group)
        trainer = Trainer(model, rows(), SETTINGS)
        run = trainer.run()
        next(run)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        if group.rank == group.size - 1:  # on one rank only: the others must hear of it
            model.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *a: a[-1] * float("inf"))
        try:
            next(run)
        finally:
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "nothing was changed"

    with pytest.raises(NotFinite, match=r"^step 2: the loss is nan.*is that of transformer\.h\.1\.mlp\.c_fc(\n|$)"):
        run_threads(task, ranks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.whole(tiny.config("llama", vocab_size=257, eos_token_id=256), attention="sdpa").float().save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


def colrow(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "colrow", *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.mark.process
def test_the_commands_train_and_export(model: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"one more line, number {n}"}) for n in range(24)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    common = ["train", model, "--data", tmp_path / "d.jsonl", "--eval", tmp_path / "d.jsonl", "--no-gate", "--length", 48, "--lr", 0.01]
    first = colrow(*common, "--tp", 2, "--out", tmp_path / "two", "--steps", 8)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == str(tmp_path / "two" / "model")
    second = colrow(*common, "--tp", 1, "--out", tmp_path / "one", "--steps", 8)
    assert second.returncode == 0, second.stderr
    runs = [[json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()] for name in ("two", "one")]
    two, one = ([e["loss"] for e in run if e["event"] == "step"] for run in runs)
    assert len(two) == 8
    assert two[-1] < two[0]
    assert two == pytest.approx(one, rel=1e-4), "the curve of two ranks is that of one"
    assert "<svg" in (tmp_path / "two" / "loss.html").read_text()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "two" / "model").eos_token_id == 256
    assert trained(torch.arange(20)[None]).logits.isfinite().all()
    exported = colrow("export", tmp_path / "two", tmp_path / "again")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model" / "model.safetensors").read_bytes()
    more = colrow(*common, "--tp", 3, "--out", tmp_path / "two", "--steps", 10)
    assert more.returncode == 0, more.stderr
    assert "resumed" in more.stderr
    assert [json.loads(line)["step"] for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines() if '"step"' in line][-1] == 10


def test_mistakes_are_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("some text")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    for arguments, message in (
        (["train", model, "--data", tmp_path / "none.jsonl", "--out", tmp_path / "o"], "there is no data file"),
        (["train", model, "--data", tmp_path / "d.txt", "--out", tmp_path / "full"], "not of a training run"),
        (["train", model, "--data", tmp_path / "empty.jsonl", "--out", tmp_path / "o", "--tp", 2], "nothing to learn from"),
        (["train", model, "--data", tmp_path / "d.txt", "--out", tmp_path / "o", "--dp", 9], "9 replicas share the rows of a step"),
        (["train", model, "--data", tmp_path / "d.txt", "--out", tmp_path / "o", "--lr", "0"], "learning rate"),
        (["train", model, "--data", tmp_path / "d.txt", "--out", tmp_path / "o", "--label-smoothing", 1], "label smoothing must be"),
        (["train", model, "--data", tmp_path / "d.txt", "--out", tmp_path / "o", "--z-loss", -1], "the z-loss must be"),
        (["export", tmp_path / "full", tmp_path / "o"], "no training checkpoint"),
    ):
        done = colrow(*arguments)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
        assert message in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing to learn from"),
        ('{"text": " "}\n{"prompt": "a", "completion": ""}', "nothing to learn from"),
        ('{"text": "a"}\n{"text"', r"d\.jsonl:2 is not JSON"),
        ('{"text": "a"}\n\n{"words": "b"}', r"d\.jsonl:3 has no text that colrow knows, got \['words'\]"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "the assistant says nothing"),
        ('{"messages": ["x"]}', "message without a role, got x"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"d\.jsonl:1 is a conversation, and the model has no chat template"),
        ("\udcff", "cannot be read"),
    ],
)
def test_wrong_or_empty_data_is_refused_before_anything_starts(text: str, message: str, tmp_path: Path) -> None:
    """Also where it is the data to evaluate on. Nothing is made; without torch, so that a mistake is told at once."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer_config.json").write_text("{}")
    files = ModelFiles("m", tmp_path / "m", "config")
    good, wrong = tmp_path / "good.txt", tmp_path / "d.jsonl"
    good.write_text("text")
    wrong.write_bytes(text.encode(errors="surrogateescape"))
    for data, evaluation in ((wrong, None), (good, wrong)):
        with pytest.raises(UserError, match=message):
            check_training_files(data, evaluation, tmp_path / "out", files)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a place where nobody can make a directory")
def test_a_place_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}')
    files = ModelFiles("m", tmp_path, "config")
    with pytest.raises(UserError, match=r"nothing can be written to --out, got /proc/out"):
        check_training_files(texts, None, Path("/proc/out"), files)
    assert check_training_files(texts, None, tmp_path / "new" / "run", files)[0] == texts
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_the_ten_lines_of_the_documentation_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ids = torch.arange(24).reshape(2, 12)
    one, _ = run_threads(names["train"], 2, str(model), [{"input_ids": ids, "labels": ids}] * 3)
    reference = AutoModelForCausalLM.from_pretrained(model).train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=2e-5)
    for _ in range(3):
        loss = reference(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert one == pytest.approx(loss.item(), rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    for name, p in reference.named_parameters():
        assert (saved.get_parameter(name) - p).abs().max() < 1e-5, name
