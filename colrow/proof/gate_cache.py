"""What is remembered in the user's cache directory, one small file each: passes of the gate, and plans that were derived.

The key covers all that could change the outcome: config, plan (or for how many ranks it is), the source of colrow and of the model, the
versions of torch and transformers. A cache that cannot be read or written costs time and nothing else. Of gates only passes are remembered.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from .. import __version__
from ..errors import UserError
from ..planning.derive import derive
from ..planning.models import concrete_class
from ..planning.plan import Plan

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Pass:
    copy: str
    checks: int
    largest: float


def folder() -> Path:
    """As the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colrow" / "gate"


def planned(config: PreTrainedConfig, ranks: int, weights: Sequence[float] | None = None) -> Plan:
    """As `derive`, which takes half a second for a small model and seconds for a large one; remembered."""
    at = _key(config, f"plan {ranks} {tuple(weights or ())}")
    try:
        return Plan.from_json((folder() / f"{at}.json").read_text())
    except (OSError, ValueError, UserError):
        plan = derive(config, ranks, weights)
        _write(at, plan.to_json())
        return plan


def key(config: PreTrainedConfig, plan: Plan, sequence: str = "off") -> str:
    return _key(config, plan.to_json(), sequence)


def _key(config: PreTrainedConfig, *about: str) -> str:
    # A config from a file remembers its path, one from a hub its name: neither matters.
    said = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version", "dtype")}
    parts = [
        json.dumps(said, sort_keys=True, default=str),
        *about,
        f"{__version__} {torch.__version__} {transformers.__version__} {sys.version}",
        _source_digest(),
        _model_source(config),
    ]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()


def read(at: str) -> Pass | None:
    try:
        return Pass(**json.loads((folder() / f"{at}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write(at: str, passed: Pass) -> None:
    _write(at, json.dumps(asdict(passed)))


def _write(at: str, text: str) -> None:
    """Atomically: a reader finds the whole file or none."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".part", delete=False) as part:
            part.write(text)
        os.replace(part.name, folder() / f"{at}.json")
    except OSError:  # a read-only home: the gate is run again next time
        return


@cache
def _source_digest() -> str:
    """Of colrow's own code: a changed applier must pass again."""
    digest = hashlib.blake2b(digest_size=20)
    for file in sorted(f for suffix in ("*.py", "*.c", "*.h") for f in PACKAGE.rglob(suffix)):
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _model_source(config: PreTrainedConfig) -> str:
    """The file that defines the model: transformers may be patched, and remote code has no version."""
    cls = concrete_class(config)
    try:
        return Path(inspect.getfile(cls)).read_text() if cls else ""
    except (TypeError, OSError):
        return ""
