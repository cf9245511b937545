"""A model by what a user types: directories, files, hub names, and the older .bin files. Mistakes are said in one line."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from colrow.checkpoint import hub, model_dir
from colrow.errors import UserError
from colrow.parallel import load

from . import files, tiny
from .files import refuses, second


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return files.saved("llama", tmp_path)[0]


class TestFind:
    def test_no_such_path(self):
        for text in ("./nowhere", "/nowhere/model.gguf", "nowhere.gguf", "a/b/c"):
            with pytest.raises(UserError, match="no such file or directory"):
                model_dir.find(text)

    def test_hub_name_without_network(self, monkeypatch):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UserError, match="nobody/nothing") as e:
            model_dir.find("nobody/nothing")
        assert "\n" not in str(e.value)

    def test_hub_name_in_the_cache(self, folder, tmp_path, monkeypatch):
        """A complete copy is used without asking the network; of an incomplete one, the config is still good for planning."""
        from huggingface_hub import constants

        cache = tmp_path / "cache"
        kept = cache / "models--someone--tiny" / "snapshots" / ("0" * 40)
        kept.parent.mkdir(parents=True)
        (kept.parent.parent / "refs").mkdir()
        (kept.parent.parent / "refs" / "main").write_text("0" * 40)
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("cache"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(hub.HfApi, "model_info", lambda *a, **k: pytest.fail("the network was asked"))
        assert model_dir.find("someone/tiny").source().tensors
        second(kept).unlink()
        monkeypatch.setattr(hub.HfApi, "model_info", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
        found = model_dir.find("someone/tiny")
        assert found.config().num_attention_heads == 9
        with pytest.raises(UserError, match="not there"):
            found.source()

    def test_planning_fetches_no_weights(self, tmp_path, monkeypatch):
        asked = []

        def download(name, local_files_only=False, allow_patterns=None, **options):
            if local_files_only:
                raise OSError("not in the cache")
            asked.append(allow_patterns)
            tiny.config("llama").save_pretrained(tmp_path)
            return str(tmp_path)

        monkeypatch.setattr(hub, "snapshot_download", download)
        assert model_dir.find("someone/tiny", weights=False).config().num_attention_heads == 9
        assert asked == [hub.TEXT]

    def test_empty_directory(self, tmp_path):
        with pytest.raises(UserError, match=r"no config\.json"):
            model_dir.find(str(tmp_path))

    def test_config_only(self, tmp_path):
        tiny.config("llama").save_pretrained(tmp_path)
        found = model_dir.find(str(tmp_path))
        assert found.kind == "config"
        assert found.config().num_attention_heads == 9
        refuses(tmp_path, "no weights")

    def test_a_file_that_is_no_model(self, folder):
        with pytest.raises(UserError, match="directory"):
            model_dir.find(str(second(folder)))

    def test_config_that_is_no_config(self, folder):
        for text in ("{", "[]", '{"model_type": "no-such-model"}'):
            (folder / "config.json").write_text(text)
            with pytest.raises(UserError, match=r"config\.json") as e:
                model_dir.find(str(folder)).config()
            assert "\n" not in str(e.value)

    def test_code_of_its_own_needs_a_word(self, folder):
        text = json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}})
        (folder / "config.json").write_text(text)
        (folder / "code.py").write_text("raise SystemExit('this must not run')")
        with pytest.raises(UserError, match="trust-remote-code"):
            model_dir.find(str(folder)).config()

    def test_no_tokenizer(self, folder):
        with pytest.raises(UserError, match="tokenizer"):
            model_dir.find(str(folder)).tokenizer()

    def test_picklable(self, folder):
        found = model_dir.find(str(folder))
        assert pickle.loads(pickle.dumps(found)) == found


class TestBin:
    def test_same_slices(self, tmp_path):
        model = tiny.whole(tiny.config("gpt2"), torch.float32)
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        found = model_dir.find(str(tmp_path))
        assert found.kind == "bin"
        plan = files.plan(found.config(), 3)
        models = [files.split(found.config(), plan, rank) for rank in range(3)]
        for m in models:
            load.from_source(m, found.source())
        merged = files.merged(models, plan)
        for name, p in model.named_parameters():
            assert torch.equal(merged[name], p), name

    def test_code_is_not_run(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "ran",))

        tiny.config("gpt2").save_pretrained(tmp_path)
        torch.save({"x": Evil()}, tmp_path / "pytorch_model.bin")
        refuses(tmp_path, "pytorch_model.bin", "code")
        assert not (tmp_path / "ran").exists()


class TestOfNoUse:
    """What came to the user as "rank 0 failed", with a Python error."""

    @pytest.mark.parametrize(
        ("field", "value"), [("num_attention_heads", 0), ("hidden_size", None), ("hidden_size", "many"), ("dtype", "float99")]
    )
    def test_a_config_whose_fields_are_none(self, folder, field, value):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(UserError, match="cannot read .*config.json, got ...") as error:
            model_dir.find(str(folder)).config()
        assert "\n" not in str(error.value)

    def test_weights_that_cannot_be_opened(self, tmp_path):
        folder = files.save(tiny.whole(tiny.config("llama")), tmp_path, "1GB")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to("nowhere")
        with pytest.raises(UserError, match="cannot be opened, got No such file"):
            model_dir.find(str(folder)).source()
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").mkdir()
        with pytest.raises(UserError, match="cannot be opened, got Is a directory"):
            model_dir.find(str(folder)).source()
        (folder / "model.safetensors").rmdir()
        (folder / "pytorch_model.bin").write_bytes(b"abc" * 100)
        with pytest.raises(UserError, match="is damaged"):
            model_dir.find(str(folder)).source()
