"""The library: plan, load, parallelize, verify, init, spawn. Each is a few lines that call the packages in order.

    plan = colrow.plan("path/or/name", tp=2)                # no weights, no processes
    with colrow.init() as group:                            # under torchrun; or colrow.spawn(fn, tp=2)
        model = colrow.load("path/or/name", group)          # an ordinary nn.Module

MODEL is a directory, a .gguf file, a hub name, or "demo".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .comm import launch
from .comm.collectives import barrier
from .comm.decide import on_rank_0
from .comm.group import Group, single
from .engine.settings import INT8, check_dtype
from .errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from .checkpoint.model_dir import ModelFiles
    from .engine.account import Stages
    from .engine.engine import Engine
    from .parallel.load import Progress
    from .parallel.sequence import Mode
    from .planning.plan import Plan
    from .proof.report import Report


def plan(
    model: str | PreTrainedConfig, tp: int, split: Sequence[float] | None = None, trust_remote_code: bool = False, block: int = 1
) -> Plan:
    """How `model` (MODEL or a transformers config) is split over `tp` ranks, in proportion to `split` where given. Reads no weights.

    `block`: cut between blocks of so many elements, in which quantized files keep their weights (planning/derive.py).
    `print(plan)` shows it, `plan.why("layers.0.mlp.down_proj.weight")` gives the reason of one parameter.
    """
    from .planning.derive import derive

    weights = check_degree(tp, split)
    if isinstance(model, str):
        model = _find(model, trust_remote_code).config()
    return derive(model, tp, weights, block)


def load(
    model: str | ModelFiles,
    group: Group,
    plan: Plan | None = None,
    split: Sequence[float] | None = None,
    dtype: str | torch.dtype = "auto",
    gate: bool = True,
    trust_remote_code: bool = False,
    stages: Stages | None = None,
    progress: Progress | None = None,
    sequence: Mode = "off",
    adapter: str | Path | None = None,
) -> PreTrainedModel:
    """This rank's part of the model, in eval mode on the group's device: a transformers model whose logits and loss are the whole ones'.

    A collective of all ranks. Rank 0 plans (unless `plan` is given) and has the plan proven on a small copy (unless `gate` is False) before
    a weight is read. UserError, as early, where the parameters cannot fit. `dtype` "auto" is that of the files, float32 for GGUF.
    `stages.results` gets the plan and the gate's result.
    `sequence` "again" or "keep": in training the residual stream is cut along the sequence (parallel/sequence.py). `adapter`: a LoRA
    adapter as PEFT writes it, which is merged into the weights.
    """
    from .engine.account import Stages

    stages = stages or Stages()
    weights = check_degree(group.size, split)
    with stages("imports"):
        from .parallel import build, room
        from .parallel.load import from_source
        from .planning.derive import check_made_for
        from .proof.gate import gate as prove
        from .proof.gate_cache import planned
    with stages("find"):
        files = on_rank_0(lambda: _find(model, trust_remote_code), group, "load.find")
        config, generation = files.config(), _generation_config(files)
        if adapter is not None:
            from .parallel.adapter_files import load_adapter, read_config
            from .parallel.adapters import merge_adapter

            on_rank_0(lambda: bool(read_config(Path(adapter))), group, "load.adapter")
        wanted = the_dtype(dtype, config)
        source = files.source()
    with stages("plan"):
        barrier(group, "load.start")  # ranks may be threads: none may touch a model while rank 0 traces one
        chosen = on_rank_0(lambda: check_made_for(plan, config) if plan else planned(config, group.size, weights), group, "load.plan")
        if chosen.ranks != group.size:
            raise UserError(f"the plan is for {chosen.ranks} ranks", group.size, f"--tp {chosen.ranks}")
        room.check(chosen, wanted, group)
    if gate:
        with stages("gate"):
            stages.results["gate"] = on_rank_0(lambda: str(prove(config, chosen, sequence=sequence)), group, "load.gate")
    stages.results["plan"] = chosen
    with stages("load"):
        part = cast("PreTrainedModel", build.split(build.empty(config, wanted), chosen, group, sequence))
        warnings = from_source(part, source, wanted, group.device, progress)
        source.close()
        if adapter is not None:
            merge_adapter(load_adapter(part, adapter))
    if generation is not None:
        part.generation_config = generation
    stages.results["warnings"] = warnings
    return part.eval()


def open_engine(
    model: str | ModelFiles, group: Group, purpose: str = "the engine", translators: bool = True, compact: bool = True, **options: Any
) -> Engine:
    """An Engine for MODEL: `load` with the same options, then its tokenizer and generation settings on rank 0. UserError, before weights
    are read, where the model does not generate text from text; `purpose` is said in it. `translators`: an encoder-decoder will do.
    `compact`: bfloat16 weights are kept in 12 bits, the same to the bit, where that is faster (parallel/compact.py)."""
    import torch

    from .engine.account import Stages
    from .engine.engine import Engine
    from .parallel.compact import compact_layers
    from .parallel.int8 import quantize_layers
    from .planning.models import require_text

    stages = options.setdefault("stages", Stages())
    files = on_rank_0(lambda: _find(model, options.pop("trust_remote_code", False)), group, "engine.find")
    on_rank_0(lambda: require_text(files.config(), purpose, translators), group, "engine.kind")
    int8 = check_dtype(options.get("dtype", "auto"), int8=True) == INT8
    with stages("tokenizer"):  # before the weights: a mistake should not take minutes to be seen
        made: list[Any] = []  # stays on rank 0: only its errors go to the others
        on_rank_0(lambda: made.append(files.tokenizer()), group, "engine.tokenizer")
    part = load(files, group, **options | ({"dtype": "auto"} if int8 else {}))
    if int8:
        with stages("int8"):
            stages.results["kept"] = quantize_layers(part)
    engine = Engine(part, group, made[0] if made else None)
    if engine.rules.warning:
        stages.results["warnings"] = (*stages.results["warnings"], engine.rules.warning)
    with stages("program"):
        engine.decoder.prepare()
        if compact and not int8 and engine.decoder.program is not None and engine.decoder.program.dtype is torch.bfloat16:
            engine.decoder.forget()  # it holds the weights
            stages.results["kept"] = compact_layers(part)
            engine.decoder.prepare()
    how = stages.results.get("kept")
    stages.results["decoding"] = "; ".join([engine.decoder.steps, *([str(how)] if how else [])])
    return engine


def parallelize(model: PreTrainedModel, group: Group, plan: Plan | None = None, gate: bool = True) -> PreTrainedModel:
    """Splits a transformers model whose weights are in memory, in place. A collective of all ranks, each with the same whole model."""
    from .parallel import build
    from .planning.derive import derive
    from .proof.gate import gate as prove

    chosen = on_rank_0(lambda: plan or derive(model.config, group.size), group, "parallelize.plan")
    if gate:
        on_rank_0(lambda: str(prove(model.config, chosen)), group, "parallelize.gate")
    return cast("PreTrainedModel", build.parallelize(model, chosen, group))


def verify(
    model: str | ModelFiles, tp: int, split: Sequence[float] | None = None, dtype: str | torch.dtype = "float32", **options: Any
) -> Report:
    """The proof that the split model equals the whole one, with real processes: `print(report.text())`, `report.equal`.

    `options` as in proof.verify: backend, small, train, stream, plan, progress, sequence.
    """
    from .proof.verify import verify as prove

    return prove(_find(model, False), tp, check_degree(tp, split), the_dtype(dtype), **options)


@contextmanager
def init(tp: int | None = None, backend: str = "auto") -> Iterator[Group]:
    """The group of this process: the ranks that torchrun has started, else this process alone. UserError where `tp` says another number."""
    joined = launch.under_torchrun()
    group = launch.join(backend) if joined else single()
    if tp is not None and tp != group.size:
        there = "torchrun started" if joined else "this one is alone"
        what = f"tp={tp} needs as many processes, and {there}"
        raise UserError(what, group.size if joined else None, f"torchrun --nproc-per-node {tp} program.py, or colrow.spawn(fn, tp={tp})")
    yield group


def spawn(fn: Callable[..., Any], tp: int, *args: Any, backend: str = "auto") -> list[Any]:
    """`fn(group, *args)` in `tp` new processes of this host; the results in rank order. `fn` is at the top level of a module."""
    return launch.spawn(fn, tp, args, backend)


def check_degree(tp: int, split: Sequence[float] | None = None) -> tuple[float, ...] | None:
    """`split` as weights, None for equal ranks. UserError where the two do not fit each other."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise UserError("tp must be a whole number of at least 1", tp, "--tp 2")
    if not split:
        return None
    if len(split) != tp or min(split) <= 0:
        example = ",".join(["3", "1", *["1"] * tp][:tp])
        raise UserError(f"split must be {tp} weights above 0", ",".join(f"{w:g}" for w in split), f"--split {example}")
    return tuple(float(w) for w in split)


def _find(model: str | ModelFiles, trust_remote_code: bool) -> ModelFiles:
    from .checkpoint.model_dir import find

    return find(model, trust_remote_code) if isinstance(model, str) else model


def the_dtype(name: str | torch.dtype, config: PreTrainedConfig | None = None) -> torch.dtype:
    import torch

    known = check_dtype(name)
    found = (getattr(config, "dtype", None) or torch.float32) if known == "auto" else getattr(torch, known)
    return getattr(torch, found) if isinstance(found, str) else found


def _generation_config(files: ModelFiles) -> Any:
    """generation_config.json beside the weights (it may name more end-of-sequence ids than the config); None where there is none."""
    from transformers import GenerationConfig

    if not (files.path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(files.path, local_files_only=True)
    except (ValueError, OSError, TypeError) as error:
        path = files.path / "generation_config.json"
        raise UserError(f"transformers cannot read {path}", error, "the file as save_pretrained() wrote it") from error
