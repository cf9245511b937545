"""Options that several commands share, read and checked before anything is started."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..checkpoint.model_dir import ModelFiles, find
from ..engine.settings import check_dtype
from ..errors import UserError
from ..train import lines
from .job import Opening
from .units import nbytes

if TYPE_CHECKING:
    from ..planning.plan import Plan

RANK_BYTES = 400 * 1024**2  # what torch and transformers take in a process


def opened(
    model: str,
    tp: int | None,
    split: str | None,
    plan_file: Path | None,
    dtype: str,
    gate: bool,
    trust_remote_code: bool,
    adapter: Path | None = None,
    trace: bool = False,
    int8: bool = True,
    dp: int = 1,
    compact: bool = True,
) -> tuple[int, Opening]:
    """The ranks of one replica, and how MODEL is opened on them, from the options of a command. UserError for what cannot work."""
    started = time.time()
    shares, given = read_split(split), read_plan(plan_file)
    ranks = degree(tp, shares, given, dp)
    checked, adapter = check_dtype(dtype, int8=int8), check_adapter(adapter)
    files = find_with_weights(model, trust_remote_code)
    return ranks, Opening(files, started, shares, given, checked, gate, trace, adapter, compact)


def read_split(text: str | None) -> tuple[float, ...]:
    """ "3,1" -> (3.0, 1.0); () where there is none."""
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError("split must be numbers with commas between them", text, "--split 3,1") from None


def read_plan(path: Path | None) -> Plan | None:
    """The plan in the file; None where there is none."""
    if path is None:
        return None
    from ..planning.plan import Plan

    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the plan cannot be read", f"{path}: {error}", "a file that colrow plan MODEL --json FILE wrote") from error


def degree(tp: int | None, split: tuple[float, ...], plan: Plan | None, dp: int = 1) -> int:
    """The number of ranks: --tp, else what --split, --plan or torchrun say, else 1. UserError where they contradict each other.

    Of each of `dp` replicas: torchrun must have started as many ranks for all of them."""
    if dp < 1:
        raise UserError("dp must be at least 1", dp, "--dp 2")
    world = os.environ.get("WORLD_SIZE", "")
    started = int(world) if world.isdecimal() and "RANK" in os.environ else None
    if started is not None and started % dp:
        raise UserError(f"the {started} ranks of torchrun are no whole number of replicas", f"--dp {dp}", "a number that divides them")
    said = {
        "--tp": tp,
        "--split": len(split) or None,
        "--plan": plan.ranks if plan is not None else None,
        "torchrun": started // dp if started is not None else None,
    }
    given = {name: ranks for name, ranks in said.items() if ranks is not None}
    if len(set(given.values())) > 1:
        words = " and ".join(f"{name} for {ranks}" if name in ("--split", "--plan") else f"{name} {ranks}" for name, ranks in given.items())
        other = next(ranks for name, ranks in given.items() if name != "--tp")
        raise UserError("the number of ranks is given twice, differently", words, f"--tp {other}")
    ranks = next(iter(given.values()), 1)
    if ranks < 1:
        raise UserError("tp must be at least 1", ranks, "--tp 2")
    said_split = ",".join(f"{w:g}" for w in split)
    if split and not (min(split) > 0 and math.isfinite(sum(split))):
        raise UserError("the shares of split must be above 0", said_split, "--split 3,1")
    if split and plan is not None and _shares(split) != _shares(plan.weights or (1.0,) * ranks):
        raise UserError("--plan has shares of its own, and --split says others", said_split, "--plan alone, or --split alone")
    return ranks


def _shares(split: tuple[float, ...]) -> list[float]:
    return [round(share / sum(split), 9) for share in split]


def check_room(ranks: int) -> None:
    """UserError for more processes than this host's memory can hold, whatever the model: a slip of the finger should not halt the host."""
    room = psutil.virtual_memory().total
    if ranks * RANK_BYTES > room:
        what = f"ranks of this host need about {nbytes(RANK_BYTES)} each before they hold a weight, and it has {nbytes(room)} of memory"
        raise UserError(what, f"{ranks} ranks", f"--tp {room // RANK_BYTES} at most, or torchrun on several hosts")


def find_with_weights(model: str, trust_remote_code: bool) -> ModelFiles:
    """The model's files. UserError, before anything is started, also where there is a config but no weights, or quantized ones."""
    files = find(model, trust_remote_code)
    files.refuse_quantized()
    if files.kind == "config":
        files.source()
    return files


def check_adapter(path: Path | None) -> Path | None:
    """UserError, before anything is started, where there is no adapter."""
    if path is not None and not (path / "adapter_config.json").is_file():
        raise UserError("there is no adapter_config.json in", path, "--adapter DIR, a directory that PEFT's save_pretrained wrote")
    check_peft(path is not None)
    return path.resolve() if path is not None else None


def check_writable(path: Path | None, works: str) -> None:
    """UserError, before anything is started, for a file that could not be written at the end of it all."""
    if path is None:
        return
    if path.is_dir():
        raise UserError("the file to write is a directory", path, works)
    if not path.parent.is_dir():
        raise UserError("there is no directory for the file to write", path, works)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError("the file cannot be written", path, works)


def check_training_files(data_file: Path, evaluation: Path | None, out: Path, model: ModelFiles) -> tuple[Path, Path | None]:
    """UserError, before anything is started, where data is missing, empty or wrong, or `out` cannot be a run's directory."""
    for path in (data_file, *([evaluation] if evaluation else [])):
        if not path.is_file():
            raise UserError("there is no data file", path, "--data F.jsonl or F.txt")
        talk = next((said.where for said in lines.read(path) if said.messages), None)
        if talk is not None and not model.may_have_chat_template():
            raise UserError(f"{talk} is a conversation, and the model has no chat template", model.name, '{"text": ...}')
    if out.exists() and not out.is_dir():
        raise UserError("--out must be a directory", out, "a new name")
    if out.is_dir() and any(out.iterdir()) and not (out / "checkpoints").is_dir() and not (out / "log.jsonl").is_file():
        raise UserError("--out has files in it that are not of a training run", out, "a new name")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # os.access says yes to root where the file system says no
            pass
    except OSError as e:
        raise UserError("nothing can be written to --out", f"{out} ({e.strerror})", "a directory with room for the model") from e
    return data_file.resolve(), evaluation.resolve() if evaluation else None


def check_peft(wanted: bool) -> None:
    """UserError where the package is `wanted` and not installed. It is not imported, which takes seconds."""
    if wanted and importlib.util.find_spec("peft") is None:
        raise UserError("adapters need the package peft, which is not installed", works="pip install peft")


def check_png(path: Path | None) -> None:
    """UserError where the loss curve could not be drawn into this file. matplotlib is not imported, which takes a second."""
    if path is not None and path.suffix != ".png":
        raise UserError("the loss curve is drawn as a PNG", path, "--curve loss.png (the --out directory has it as SVG and HTML)")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("a PNG needs the package matplotlib, which is not installed", path, "pip install matplotlib, or loss.svg in --out")
    check_writable(path, "--curve loss.png")


def check_origins(given: list[str] | None) -> tuple[str, ...]:
    """The sites. UserError for what no browser says of itself: anything but scheme and host, in small letters."""
    for origin in given or ():
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin):
            works = "--allow-origin https://example.com, or * for all"
            raise UserError("an origin is a scheme and a host, in small letters, without a path", origin, works)
    return tuple(given or ())


def at_least_1(max_new_tokens: int | None) -> int | None:
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UserError("max-new-tokens must be at least 1", max_new_tokens, "--max-new-tokens 100")
    return max_new_tokens


@dataclass(frozen=True)
class Asked:
    """What `plan` is asked about the model: `batch` sequences of `seq` tokens, also a training step; `memory` of a device, 0 = its own."""

    batch: int
    seq: int
    train: bool
    memory: float


_UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def read_bytes(text: str, option: str = "--memory") -> float:
    """ "8GB" -> 8e9, "80 GiB" -> 85899345920; 0 where there is nothing."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).upper() if found else ""
    unit += "B" if unit in ("K", "M", "G", "T") else ""
    if not text:
        return 0.0
    if found is None or unit not in _UNITS or float(found.group(1)) == 0:
        raise UserError(f"{option.removeprefix('--')} must be a size with a unit, above 0", text, f"{option} 8GB")
    return float(found.group(1)) * _UNITS[unit]
