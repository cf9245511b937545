"""Vision-language models: every tower planned from one trace with pictures in it, and proven with pictures in front of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colrow.checkpoint.model_dir import find
from colrow.comm.group import Group
from colrow.comm.local import run_threads
from colrow.engine.generate import generate
from colrow.engine.settings import Sampling
from colrow.engine.stopping import Limits
from colrow.errors import UserError
from colrow.parallel.build import parallelize
from colrow.planning.derive import derive
from colrow.planning.inputs import fitting
from colrow.planning.models import build
from colrow.planning.replay import check
from colrow.proof.gate import GateRefused, prove
from colrow.proof.integers import Integers
from colrow.proof.noise import add_noise
from colrow.proof.shrink import Small
from colrow.proof.verify import verify

from .families import SEEING
from .faults import plant
from .test_families import share

COVERED = {"gemma3": 0.85, "paligemma": 0.85, "idefics3": 0.86, "smolvlm": 0.86, "mllama": 0.92}
TOWERS = {"mllama": 6}  # attention modules of both towers; 4 else


@pytest.mark.parametrize(("family", "ranks"), [(f, 3 if f in ("qwen2.5-vl", "llava") else 2) for f in SEEING if f != "llava-next"])
def test_both_towers_are_split_and_proven(family: str, ranks: int) -> None:
    config = SEEING[family]()
    plan = derive(config, ranks)
    assert "pixel_values" in plan.inputs
    assert len(plan.attention) == TOWERS.get(family, 4)
    assert share(plan) >= COVERED.get(family, 0.94)
    found = prove(Small(config, plan, ()))
    assert found.ok
    assert found.of("tokens")[0].name == "6 greedy tokens"


def test_what_cannot_be_followed_is_said_and_the_text_is_split_all_the_same() -> None:
    config = SEEING["llava-next"]()
    plan = derive(config, 2)
    assert plan.inputs == ("input_ids",)
    assert len(plan.attention) == 2
    assert any(n.subject == "inputs other than tokens" for n in plan.notes)
    assert prove(Small(config, plan, ())).ok


@pytest.mark.parametrize(
    ("family", "fault", "at"),
    [
        ("llava", "drop g", "vision_tower.encoder.layers.0.mlp.fc2"),
        ("qwen2-vl", "drop f", "visual.blocks.0.norm1"),
        ("gemma3", "drop g", "language_model.layers.1.mlp.down_proj"),
    ],
)
def test_a_planted_fault_is_seen(family: str, fault: str, at: str) -> None:
    config = SEEING[family]()
    with plant(fault, at), pytest.raises(GateRefused, match="looks like a bug"):
        prove(Small(config, derive(config, 2), ()))


def test_the_replay_agrees() -> None:
    config = SEEING["llava"]()
    assert check(config, derive(config, 2)).ok


def test_pictures_take_their_places_among_the_tokens() -> None:
    model = build(SEEING["llava"](), dtype=torch.float32).eval()
    given = fitting(model, 2, 7)
    assert given["pixel_values"].shape == (2, 3, 16, 16)
    assert (given["input_ids"] == 100).sum(1).tolist() == [16, 16], "patches, without the class token"
    assert model(**given).logits.shape == (2, given["input_ids"].shape[1], 101)


def test_special_tokens_stay_apart_in_a_small_vocabulary() -> None:
    """A picture's token and padding, both beyond the new vocabulary, do not become one."""
    integers = Integers(SEEING["gemma3"]())
    small = integers.config(integers.with_values(integers.state, {("text_config", "vocab_size"): 20}))
    assert (small.image_token_index, small.eoi_token_index, small.boi_token_index) == (19, 18, 17)


def test_verify_with_weights_from_files_and_text_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model directory goes through: names of checkpoints, both towers, every gradient; without pictures it writes text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = SEEING["gemma3"]()
    model = build(config, dtype=torch.float32).eval()
    add_noise(model)
    model.save_pretrained(tmp_path / "model")
    files = find(str(tmp_path / "model"))
    report = verify(files, 2, backend="threads")
    assert report.equal, report.text()
    with pytest.raises(UserError, match="token ids alone"):
        verify(files, 2, backend="threads", stream=True)
    expected = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)[0, 3:].tolist()  # type: ignore[operator]
    plan = derive(config, 2)
    copies = [build(config, dtype=torch.float32).eval() for _ in range(2)]
    for one in copies:
        add_noise(one)

    def rank(group: Group) -> list[int | None]:
        part = parallelize(copies[group.rank], plan, group)
        return [step.tokens[0] for step in generate(part, group, [[3, 4, 5]], Sampling(0.0), Limits(4))]

    assert run_threads(rank, 2) == [expected, expected]
