"""colrow: tensor parallelism for any Hugging Face transformer, with the proof that the split model equals the whole one.

The public names are imported when they are first used, so that `import colrow` and `colrow --help` are quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import init, load, open_engine, parallelize, plan, spawn, verify
    from .comm.group import Group
    from .engine.settings import Sampling
    from .errors import ColrowError, RankError, UserError
    from .host import Engine
    from .parallel.adapter_files import load_adapter, save_adapter
    from .parallel.adapters import add_adapter, merge_adapter
    from .parallel.head import sharded_logits
    from .planning.plan import Plan
    from .train.gradients import clip_grad_norm
    from .train.trainer import Trainer

__version__ = "0.1.0"

_PLACES = {
    "ColrowError": "errors",
    "Engine": "host",
    "Group": "comm.group",
    "Plan": "planning.plan",
    "RankError": "errors",
    "Sampling": "engine.settings",
    "Trainer": "train.trainer",
    "UserError": "errors",
    "add_adapter": "parallel.adapters",
    "clip_grad_norm": "train.gradients",
    "init": "api",
    "load": "api",
    "load_adapter": "parallel.adapter_files",
    "merge_adapter": "parallel.adapters",
    "open_engine": "api",
    "parallelize": "api",
    "plan": "api",
    "save_adapter": "parallel.adapter_files",
    "sharded_logits": "parallel.head",
    "spawn": "api",
    "verify": "api",
}
__all__ = [
    "ColrowError",
    "Engine",
    "Group",
    "Plan",
    "RankError",
    "Sampling",
    "Trainer",
    "UserError",
    "add_adapter",
    "clip_grad_norm",
    "init",
    "load",
    "load_adapter",
    "merge_adapter",
    "open_engine",
    "parallelize",
    "plan",
    "save_adapter",
    "sharded_logits",
    "spawn",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'colrow' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    return value
