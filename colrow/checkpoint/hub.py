"""Models by hub name: from the cache on this machine, else downloaded, else one clear error.

Only config, tokenizer and weights are fetched, safetensors before PyTorch files, never code.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from ..errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SECONDS = 10.0  # to wait for the hub to say whether it has the model
TEXT = ["*.json", "*.model", "*.txt", "*.jinja"]


def snapshot(name: str) -> Path:
    """The directory of the model's files. UserError where the name is no hub name, or neither cache nor network has it."""
    if not NAME.fullmatch(name) or name.endswith(".gguf"):
        raise UserError("there is no such file or directory", name, "a directory with config.json, a .gguf file, a hub name, or demo")
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not in the cache
    try:
        files = [f.rfilename for f in HfApi().model_info(name, timeout=SECONDS).siblings or ()]
        weights = next((p for p in ("*.safetensors", "*.gguf", "*.bin") if any(f.endswith(p[1:]) for f in files)), "*.safetensors")
        return Path(snapshot_download(name, allow_patterns=[*TEXT, weights]))
    except RepositoryNotFoundError as e:
        raise UserError(
            "no directory and no public model on the hub has this name", name, "demo, a directory, or a login for private models"
        ) from e
    except Exception as e:  # the hub's client lets the errors of its HTTP library through
        raise UserError(
            "no directory of this name, not in the hub's cache, and the hub cannot be reached",
            f"{name} ({type(e).__name__})",
            "demo, or a directory",
        ) from e
