"""Files: what is wrong with them is said in one line that names the file; slices are what the whole tensor's slices are."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from colrow.checkpoint import model_dir, names, pages, safetensors, source
from colrow.errors import UserError
from colrow.parallel import load

from . import files, tiny
from .files import refuses, second


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return files.saved("llama", tmp_path)[0]


class TestSlices:
    @pytest.mark.parametrize("dim", [None, 0, 1, 2])
    @pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
    def test_any_dim_and_ranges(self, dim, wanted, tmp_path, monkeypatch):
        monkeypatch.setattr(source, "STAGE_BYTES", 24)  # conversions cross the buffer's border often
        whole = torch.randn(5, 7, 11)
        save_file({"pad": torch.zeros(3), "x": whole}, tmp_path / "model.safetensors")
        files_ = safetensors.open_directory(tmp_path)
        for ranges in [((0, 2),), ((1, 2), (3, 5)), ((0, 1), (1, 4)), ((0, 5),), ()]:
            got = files_.read("x", dim, ranges, wanted)
            parts = [whole] if dim is None else [whole.narrow(dim, a, b - a) for a, b in ranges]
            expected = torch.cat(parts, dim or 0) if parts else whole.narrow(dim, 0, 0)
            before = files_.bytes_read
            assert torch.equal(got, expected.to(wanted))
            files_.read("x", dim, ranges)
            assert files_.bytes_read - before == 4 * expected.numel()

    def test_ranges_outside_are_refused(self, tmp_path):
        save_file({"x": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
        files_ = safetensors.open_directory(tmp_path)
        for ranges in [((2, 4),), ((1, 1),), ((2, 3), (0, 1))]:
            with pytest.raises(ValueError, match="do not fit"):
                files_.read("x", 0, ranges)


def test_large_pages_are_asked_for_within_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *place: asked.append(place))
    assert pages.empty((3, pages.PAGE // 5), torch.int8).shape == (3, pages.PAGE // 5)
    assert not asked
    large = pages.empty((3, pages.PAGE), torch.int8)
    ((start, size, _),) = asked
    assert size >= 2 * pages.PAGE
    assert start % pages.PAGE == size % pages.PAGE == 0
    assert large.data_ptr() <= start
    assert start + size <= large.data_ptr() + large.nbytes


class TestIndex:
    """O-23."""

    def test_missing_file(self, folder):
        gone = second(folder)
        gone.unlink()
        refuses(folder, gone.name, "not there")

    @pytest.mark.parametrize(("shard", "words"), [("20KB", "no weights for 1 of"), ("70KB", "index .* does not list")])
    def test_key_missing_from_the_index(self, shard, words, tmp_path):
        """In the first case no other tensor is in its file, so the index does not name the file either."""
        folder = files.save(tiny.whole(tiny.config("llama"), torch.float32), tmp_path, shard)
        index = folder / safetensors.INDEX
        data = json.loads(index.read_text())
        del data["weight_map"]["model.layers.1.mlp.up_proj.weight"]
        index.write_text(json.dumps(data))
        found = model_dir.find(str(folder))
        plan = files.plan(found.config(), 2)
        with pytest.raises(UserError, match=words + r".* model\.layers\.1\.mlp\.up_proj\.weight"):
            load.from_source(files.split(found.config(), plan, 0), found.source())

    def test_key_missing_from_the_file(self, folder):
        path = second(folder)
        tensors = load_file(path)
        lost = sorted(tensors)[0]
        del tensors[lost]
        save_file(tensors or {"other": torch.zeros(1)}, path)
        refuses(folder, path.name, lost)

    def test_file_outside(self, folder):
        index = folder / safetensors.INDEX
        data = json.loads(index.read_text())
        data["weight_map"]["model.norm.weight"] = "../secret.safetensors"
        index.write_text(json.dumps(data))
        refuses(folder, "../secret.safetensors", "outside")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "<!DOCTYPE html><html>"])
    def test_no_index(self, text, folder):
        (folder / safetensors.INDEX).write_text(text)
        refuses(folder, safetensors.INDEX)

    def test_several_files_without_index(self, folder):
        (folder / safetensors.INDEX).unlink()
        refuses(folder, safetensors.INDEX)


class TestDamage:
    """O-24."""

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda b: b[:-1], ("cut off", "needed", "incomplete download?")),
            (lambda b: b[: len(b) // 2], ("cut off", "incomplete download?")),
            (lambda b: b[:20], ("cut off inside its header",)),
            (lambda b: b[:3], ("not a safetensors file",)),
            (lambda b: b"", ("empty", "0 bytes")),
            (lambda b: struct.pack("<Q", 2**40) + b[8:], ("not a safetensors file",)),
            (lambda b: b"<!DOCTYPE html><html><body>404</body></html>", ("an HTML page",)),
            (lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", ("git lfs pull",)),
            (lambda b: b + b"\0", ("longer than its header says",)),
            (lambda b: b[:8] + b"[" + b[9:], ("damaged header",)),
        ],
    )
    def test_file(self, change, words, folder):
        path = second(folder)
        path.write_bytes(change(path.read_bytes()))
        refuses(folder, path.name, *words)

    @pytest.mark.parametrize(
        ("header", "words"),
        [
            ({"__metadata__": {"format": "pt"}}, ("no tensors",)),
            (
                {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
                ("overlapping", "b at"),
            ),
            ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, ("gap",)),
            ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, ("another size", "a ")),
            ({"a": {"dtype": "F32", "shape": [2]}}, ("damaged header",)),
            ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}, ("a",)),
        ],
    )
    def test_header(self, header, words, tmp_path):
        tiny.config("llama").save_pretrained(tmp_path)
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
        refuses(tmp_path, "model.safetensors", *words)


class TestAgainstTheModel:
    def fails(self, folder: Path, match: str) -> None:
        found = model_dir.find(str(folder))
        plan = files.plan(tiny.config("llama"), 2)
        with pytest.raises(UserError, match=match):
            load.from_source(files.split(tiny.config("llama"), plan, 0), found.source())

    def change(self, folder: Path, name: str, value: torch.Tensor) -> None:
        path = folder / json.loads((folder / safetensors.INDEX).read_text())["weight_map"][name]
        save_file(load_file(path) | {name: value}, path)

    def test_shape(self, folder):
        self.change(folder, "model.norm.weight", torch.ones(71))
        self.fails(folder, r"safetensors holds model\.norm\.weight of shape \[71\].*needs \[72\]")

    def test_whole_numbers(self, folder):
        self.change(folder, "model.norm.weight", torch.ones(72, dtype=torch.int32))
        self.fails(folder, r"whole numbers, got I32")

    def test_8_bit_floats(self, folder):
        self.change(folder, "model.norm.weight", torch.ones(72).to(torch.float8_e4m3fn))
        self.fails(folder, r"model\.norm\.weight .*F8_E4M3.*dequantize")

    def test_quantization_config(self, folder):
        data = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(data | {"quantization_config": {"quant_method": "gptq"}}))
        refuses(folder, "gptq")

    def test_unused_tensors_are_named_and_known_ones_are_not(self, tmp_path):
        model = tiny.whole(tiny.config("gpt2"), torch.float32)
        state = {k.removeprefix("transformer."): v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        state["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # old files hold the causal mask
        state["h.0.surprise"] = torch.ones(2)
        save_file(state, tmp_path / "model.safetensors")
        plan = files.plan(model.config, 2)
        models = [files.split(model.config, plan, rank) for rank in range(2)]
        opened = safetensors.open_directory(tmp_path)
        (warning,) = {w for m in models for w in load.from_source(m, opened)}
        assert "h.0.surprise" in warning
        assert "attn.bias" not in warning
        merged = files.merged(models, plan)
        for name, p in model.named_parameters():
            assert torch.equal(merged[name], p), name

    def test_prefix_too_many(self, tmp_path):
        """A base model reads the files of one with a head."""
        from transformers import AutoModel

        folder, model = files.saved("llama", tmp_path)
        with torch.device("meta"):
            base = AutoModel.from_config(model.config)
        shapes = {name: tuple(p.shape) for name, p in base.named_parameters()}
        matched = names.match(base, model_dir.find(str(folder)).source(), shapes, {})
        assert matched.keys["norm.weight"] == "model.norm.weight"
        assert "lm_head.weight" in matched.warnings[0]


EXPERTS = {"mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24}}


class TestExpertsOneByOne:
    """Files that keep each expert in tensors of its own; transformers' model has one tensor for all of them."""

    def saved(self, kind: str, folder: Path):
        from transformers import AutoConfig

        config = AutoConfig.for_model(kind, **{**tiny.GROUPED, **EXPERTS[kind]})
        return files.save(tiny.whole(config, torch.float32), folder)

    @pytest.mark.parametrize("kind", EXPERTS)
    def test_every_cut(self, kind, tmp_path):
        folder = self.saved(kind, tmp_path)
        found = model_dir.find(str(folder))
        assert any(".experts.3." in key for key in found.source().tensors)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        shapes = {name: tuple(p.shape) for name, p in reference.named_parameters()}
        matched = names.match(files.on_meta(found.config()), found.source(), shapes, {})
        assert matched.warnings == ()
        for name, p in reference.named_parameters():
            for dim, size in enumerate(p.shape):
                for ranges in [((0, 1),), ((0, size // 2), (size // 2 + 1, size)), ((size - 3, size - 1),), ((0, size),), ()]:
                    if any(a >= b for a, b in ranges):
                        continue
                    parts = [p.detach().narrow(dim, a, b - a) for a, b in ranges]
                    expected = torch.cat(parts, dim) if parts else p.detach().narrow(dim, 0, 0)
                    before = matched.source.bytes_read
                    assert torch.equal(matched.source.read(matched.keys[name], dim, ranges), expected), (name, dim, ranges)
                    assert matched.source.bytes_read - before == 4 * expected.numel()
            assert torch.equal(matched.source.read(matched.keys[name], None, (), torch.float64), p.detach().double())

    @pytest.mark.parametrize("lost", ["experts.2.w1.weight", "experts.2.w"])
    def test_a_missing_expert_is_named(self, lost, tmp_path):
        folder = self.saved("mixtral", tmp_path)
        state = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items() if not ("layers.1" in k and lost in k)}
        (folder / safetensors.INDEX).unlink()
        for f in folder.glob("*.safetensors"):
            f.unlink()
        save_file(state, folder / "model.safetensors")
        found = model_dir.find(str(folder))
        with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.(gate_up|down)_proj"):
            load.from_source(files.split(found.config(), files.plan(found.config(), 2), 0), found.source())

    def test_other_conversions_are_refused_by_name(self):
        from transformers.core_model_loading import Chunk, Transpose, WeightConverter

        from colrow.checkpoint.assembled import parts_of

        for operations in ([Chunk(dim=0)], [Transpose(0, 1)]):
            assert parts_of(WeightConverter("a.weight", "b.weight", operations), {"a.weight": ["a.weight"]}) is None
