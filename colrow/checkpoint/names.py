"""Which tensor of the files belongs to which parameter of the model.

transformers knows how names of older or smaller checkpoints become names of today's modules (`base_model_prefix` missing or added, renamed
modules): its own mapping is used, nothing is guessed here. What must not happen silently is an error or a warning: a parameter without a
tensor, another shape, a tensor that nothing uses. Experts that the files keep one by one are put together (assembled.py); conversions that
do more than that are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..errors import UserError
from .assembled import AssembledSource, Assembly, parts_of
from .safetensors import readable
from .source import Source

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matched:
    """`keys[name]` is the tensor of a parameter or buffer in `source`, tied ones under their first name. `copies[name]` are the keys of
    further stored copies of a tied parameter. `warnings` are sentences for the user."""

    source: Source
    keys: dict[str, str]
    copies: dict[str, tuple[str, ...]]
    warnings: tuple[str, ...]


def match(
    model: PreTrainedModel,
    source: Source,
    shapes: Mapping[str, Shape],
    aliases: Mapping[str, tuple[str, ...]],
    optional: Iterable[str] = (),
) -> Matched:
    """Find the tensor of every name in `shapes` (shapes of WHOLE tensors).

    `aliases[name]` are the other names of a tied parameter: any of them will do. Names in `optional` (buffers) may be absent.
    UserError where a tensor is missing, cannot be read, or has another shape.
    """
    all_names = dict(shapes)
    for name, others in aliases.items():
        all_names |= dict.fromkeys(others, shapes[name])
    renamed = _rename(model, source.tensors, all_names)
    if renamed.assemblies:
        source = AssembledSource(source, renamed.assemblies)
    optional = set(optional)
    keys: dict[str, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    missing = []
    for name in shapes:
        stored = [renamed.keys[n] for n in (name, *aliases.get(name, ())) if n in renamed.keys]
        if stored:
            keys[name] = stored[0]
            copies[name] = tuple(stored[1:])
        elif name not in optional:
            missing.append(name)
    if missing:
        refuse_missing(missing, source)
    for name, key in keys.items():
        _check(name, key, shapes[name], source)
    return Matched(source, keys, {n: c for n, c in copies.items() if c}, _warn_unused(model, renamed.strangers, source))


@dataclass
class _Renamed:
    keys: dict[str, str] = field(default_factory=dict)  # {name in the model: key in the files}
    assemblies: dict[str, Assembly] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)  # keys that no name of the model fits


def _rename(model: PreTrainedModel, tensors: Iterable[str], wanted: Mapping[str, Shape]) -> _Renamed:
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, names = model.base_model_prefix, dict(wanted)
    out = _Renamed()
    collected: dict[str, dict[str, list[str]]] = {}  # keys that a converter makes a parameter of, by pattern
    for key in sorted(tensors, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        if pattern is not None and _targets(by_pattern[pattern], name) & names.keys():
            collected.setdefault(name, {}).setdefault(pattern, []).append(key)
        elif name in names and name not in out.keys:
            out.keys[name] = key
        else:
            out.strangers.append(key)
    for name, parts in collected.items():
        assembly = parts_of(by_pattern[next(iter(parts))], parts)
        if assembly is None:
            raise UserError(
                f"the files keep the model's {name} in a form that colrow does not convert, or in part",
                next(iter(parts.values()))[0],
                "load it in transformers and write it with save_pretrained(DIR, save_original_format=False)",
            )
        out.assemblies[name] = assembly
        out.keys[name] = name
    return out


def _targets(converter: WeightConverter, name: str) -> set[str]:
    """All names that a converter makes, given the first of them."""
    first = converter.target_patterns[0]
    return {name.replace(first, target) for target in converter.target_patterns}


def _check(name: str, key: str, shape: Shape, source: Source) -> None:
    info = source.tensors[key]
    stored = readable(key, info)
    if info.shape != tuple(shape):
        raise UserError(
            f"{info.file} holds {key} of shape {list(info.shape)}, the model's {name} needs {list(shape)}",
            works="the config.json of these weights",
        )
    if not stored.is_floating_point and name.rsplit(".", 1)[-1] in ("weight", "bias"):
        raise UserError(f"{info.file} holds {key} as whole numbers", info.stored, "weights in F32, F16 or BF16")


def refuse_missing(missing: list[str], source: Source) -> None:
    """UserError about parameters that no tensor of the files is for."""
    hidden = next((n for n in missing if n in source.unlisted), None)
    listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    folder = next(iter(source.tensors.values())).file.parent
    if hidden:
        raise UserError(
            f"the index of {folder} does not list a tensor that {source.unlisted[hidden].name} holds", listed, "download the index again"
        )
    raise UserError(f"{folder} has no weights for {len(missing)} of the model's parameters", listed, "files and config.json of one model")


def _warn_unused(model: PreTrainedModel, strangers: list[str], source: Source) -> tuple[str, ...]:
    """One sentence about the tensors that nothing uses, those left out that transformers ignores as well."""
    patterns = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    ignored = re.compile("|".join(f"({p})" for p in patterns)) if patterns else None
    unused = [key for key in strangers if not (ignored and ignored.search(key))]
    if not unused:
        return ()
    listed = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
    return (f"{source.tensors[unused[0]].file} holds {len(unused)} tensors that {type(model).__name__} does not use: {listed}",)


def _natural(key: str) -> tuple:
    """Order in which numbers count as numbers: transformers' renamings rely on it."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in key.split("."))
