"""Split loading: all ranks' pieces together are, bit for bit, what transformers loads; only their bytes are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from colrow.checkpoint import model_dir
from colrow.errors import UserError
from colrow.parallel import load

from . import files, tiny


def load_all(folder: Path, ranks: int, dtype: torch.dtype = torch.float32):
    """Split models of all ranks, their plan and what each read."""
    found = model_dir.find(str(folder))
    config = found.config()
    plan = files.plan(config, ranks)
    models, read, warnings = [], [], ()
    for rank in range(ranks):
        source = found.source()
        model = files.split(config, plan, rank, dtype)
        warnings = load.from_source(model, source, dtype)
        models.append(model)
        read.append(source.bytes_read)
        source.close()
    return models, plan, read, warnings


def equals_transformers(folder: Path, models: list, plan, dtype: torch.dtype = torch.float32) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    whole = files.merged(models, plan)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert whole.keys() == expected.keys()
    for name, p in expected.items():
        assert whole[name].dtype == p.dtype, name
        assert torch.equal(whole[name], p), name
    for model in models:
        for name, buffer in reference.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name
            assert model.get_buffer(name).dtype == buffer.dtype, name


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_equal_to_transformers(family, ranks, tmp_path):
    folder, _ = files.saved(family, tmp_path)
    assert len(list(folder.glob("*.safetensors"))) > 3
    models, plan, read, warnings = load_all(folder, ranks)
    equals_transformers(folder, models, plan)
    assert warnings == ()
    for rank, model in enumerate(models):
        assert read[rank] == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_float_dtypes(stored, wanted, tmp_path):
    folder, _ = files.saved("llama", tmp_path, stored)
    models, plan, read, _ = load_all(folder, 2, wanted)
    equals_transformers(folder, models, plan, wanted)
    for rank, model in enumerate(models):
        assert read[rank] == stored.itemsize * sum(p.numel() for p in model.parameters())


def test_mixed_dtypes(tmp_path):
    model = tiny.whole(tiny.config("qwen2"), torch.float32)
    for number, p in enumerate(model.parameters()):
        p.data = p.data.to([torch.float32, torch.bfloat16, torch.float16][number % 3])
    folder = files.save(model, tmp_path)
    models, plan, _, _ = load_all(folder, 3)
    equals_transformers(folder, models, plan)


def test_tied_weights_are_one_tensor_and_requires_grad_is_kept(tmp_path):
    folder, _ = files.saved("llama-tied", tmp_path)
    found = model_dir.find(str(folder))
    plan = files.plan(found.config(), 2)
    model = files.split(found.config(), plan, 1)
    model.model.norm.weight.requires_grad_(False)
    load.from_source(model, found.source())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.norm.weight.requires_grad
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_from_whole(family):
    config = tiny.config(family)
    whole = tiny.whole(config)
    plan = files.plan(config, 3)
    models = [files.split(config, plan, rank, torch.float64) for rank in range(3)]
    for model in models:
        load.from_whole(model, whole.state_dict())
    merged = files.merged(models, plan)
    for name, p in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(merged[name], p), name
    models[0].get_parameter("model.norm.weight" if family != "gpt2" else "transformer.ln_f.weight").data.zero_()
    assert not any((p == 0).all() for p in whole.parameters())  # pieces are copies


def test_a_shape_that_does_not_fit_the_plan_is_caught(tmp_path):
    folder, _ = files.saved("llama", tmp_path)
    found = model_dir.find(str(folder))
    plan = files.plan(found.config(), 2)
    model = files.split(found.config(), plan, 0)
    model.colrow.group.rank = 1  # the parameters are rank 0's
    with pytest.raises(ValueError, match="expects"):
        load.from_source(model, found.source())


def test_a_buffer_that_nothing_computes_is_caught(tmp_path):
    folder, _ = files.saved("llama", tmp_path)
    found = model_dir.find(str(folder))
    plan = files.plan(found.config(), 1)
    model = files.split(found.config(), plan, 0)
    model.model.norm.register_buffer("forgotten", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="forgotten"):
        load.from_source(model, found.source())


def test_computing_buffers_leaves_weights_alone(tmp_path, monkeypatch):
    """An initializer in the style of older code, which writes weights of the module and of its children whatever was loaded."""
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    def init_weights(self, module):
        if isinstance(module, torch.nn.Module) and "table" in module._buffers:
            module.table.copy_(torch.arange(3.0))
            for p in module.parameters():
                p.data.normal_()
        else:
            super(LlamaPreTrainedModel, self)._init_weights(module)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", init_weights, raising=False)
    folder, whole = files.saved("llama", tmp_path)
    found = model_dir.find(str(folder))
    plan = files.plan(found.config(), 1)
    model = files.split(found.config(), plan, 0)
    for module in (model.model.norm, model.model.layers[0]):
        module.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    load.from_source(model, found.source())
    assert torch.equal(model.model.layers[0].table, torch.arange(3.0))
    for name, p in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name


def test_progress_ends_at_all_elements(tmp_path):
    folder, _ = files.saved("gpt2", tmp_path)
    found = model_dir.find(str(folder))
    plan = files.plan(found.config(), 2)
    model = files.split(found.config(), plan, 0)
    seen = []
    load.from_source(model, found.source(), progress=lambda name, done, total: seen.append((name, done, total)))
    assert seen[-1][1] == seen[-1][2] == sum(p.numel() for p in model.parameters())
    assert len(seen) == len(plan.tensors)


class TestTiedHeads:
    """O-22: the config and the files disagree about the head."""

    def save(self, folder: Path, tie: bool, head: str) -> Path:
        from safetensors.torch import save_file

        model = tiny.whole(tiny.config("llama", tie_word_embeddings=tie), torch.float32)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        state.pop("lm_head.weight")
        if head == "same":
            state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        elif head == "other":
            state["lm_head.weight"] = 1 + state["model.embed_tokens.weight"]
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @pytest.mark.parametrize("head", ["same", "absent"])
    def test_tied(self, head, tmp_path):
        folder = self.save(tmp_path, True, head)
        models, plan, _, _ = load_all(folder, 2)
        equals_transformers(folder, models, plan)
        assert models[0].lm_head.weight is models[0].model.embed_tokens.weight

    def test_untied_and_absent_names_the_head(self, tmp_path):
        folder = self.save(tmp_path, False, "absent")
        with pytest.raises(UserError, match=r"lm_head\.weight"):
            load_all(folder, 2)

    def test_tied_but_stored_differently_is_untied_with_a_warning(self, tmp_path, caplog):
        folder = self.save(tmp_path, True, "other")
        models, plan, _, _ = load_all(folder, 2)
        assert "not tied" in caplog.text
        equals_transformers(folder, models, plan)
        assert models[0].lm_head.weight is not models[0].model.embed_tokens.weight

    def test_a_plan_that_ties_what_the_files_do_not_is_refused(self, tmp_path):
        folder = self.save(tmp_path, True, "other")
        found = model_dir.find(str(folder))
        config = tiny.config("llama-tied")
        plan = files.plan(config, 2)
        with pytest.raises(UserError, match="ties"):
            load.from_source(files.split(config, plan, 0), found.source())


@pytest.mark.process
def test_peak_memory_is_the_shard_and_one_tensor():
    """O-26: a 400 MB model at tp=4, in a process of its own."""
    from bench.load_memory import measure

    size, (rank,) = measure(400, 4, torch.float32, torch.float32, only=3)
    assert size > 400e6
    assert rank["read"] == rank["held"]
    assert rank["peak"] < rank["held"] + rank["largest"] + 2e6  # 2 MB for what the allocator rounds up
    assert rank["peak"] < 0.4 * size
