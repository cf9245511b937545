"""Models by hub name: from the cache on this machine if all of it is there, else downloaded, else one clear error.

Only config, tokenizer and weights are fetched, safetensors before PyTorch files, never code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from ..errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TEXT = ["*.json", "*.model", "*.txt", "*.jinja"]
WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")  # the first kind that the model has
SECONDS = 10.0  # to wait for the hub to say whether it has the model


def snapshot(name: str, weights: bool = True) -> Path:
    """The directory of the model's files; without `weights`, of config and tokenizer alone. UserError where the name is no hub name, or
    neither cache nor network has it.

    Without a network, a cached config without weights is returned as well: planning needs no more.
    """
    if not NAME.fullmatch(name) or name.endswith(".gguf"):
        raise UserError("there is no such file or directory", name, "a directory with config.json, a .gguf file, a hub name, or demo")
    cached = _cached(name)
    if cached and (has_all_weights(cached) if weights else (cached / "config.json").is_file()):
        return cached
    try:
        if not weights:
            found = Path(snapshot_download(name, allow_patterns=TEXT, etag_timeout=SECONDS))
            return found if (found / "config.json").is_file() else snapshot(name)  # GGUF files hold their config themselves
        files = [f.rfilename for f in HfApi().model_info(name, timeout=SECONDS).siblings or ()]
        kind = next((p for p in WEIGHTS if any(f.endswith(p[1:]) for f in files)), WEIGHTS[0])
        return Path(snapshot_download(name, allow_patterns=[*TEXT, kind]))
    except RepositoryNotFoundError as e:
        raise UserError(
            "no directory and no public model on the hub has this name", name, "demo, a directory, or a login for private models"
        ) from e
    except Exception as e:  # the hub's client lets the errors of its HTTP library through
        if cached:
            return cached
        raise UserError(
            "no directory of this name, not in the hub's cache, and the hub cannot be reached",
            f"{name} ({type(e).__name__})",
            "demo, or a directory",
        ) from e


def has_all_weights(folder: Path) -> bool:
    """Whether the folder has weights, and all files that its index names."""
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        return all((folder / name).is_file() for name in names)
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def _cached(name: str) -> Path | None:
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
