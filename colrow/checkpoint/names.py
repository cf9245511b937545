"""Which tensor of the files belongs to which parameter of the model.

transformers knows how names of older or smaller checkpoints become names of today's modules (`base_model_prefix` missing or added, renamed
modules): its own mapping is used, nothing is guessed here. What must not happen silently is an error or a warning: a parameter without a
tensor, another shape, a tensor that nothing uses. Not here: conversions that change values (a checkpoint that keeps each expert in a
tensor of its own): they are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..errors import UserError
from .safetensors import readable
from .source import Source

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matched:
    """`keys[name]` is the tensor of a parameter or buffer, tied ones under their first name. `copies[name]` are the keys of further stored
    copies of a tied parameter. `warnings` are sentences for the user."""

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
    found, strangers = _rename(model, source.tensors, all_names)
    optional = set(optional)
    keys: dict[str, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    missing = []
    for name in shapes:
        stored = [found[n] for n in (name, *aliases.get(name, ())) if n in found]
        if stored:
            keys[name] = stored[0]
            copies[name] = tuple(stored[1:])
        elif name not in optional:
            missing.append(name)
    if missing:
        _refuse_missing(missing, source)
    for name, key in keys.items():
        _check(name, key, shapes[name], source)
    return Matched(keys, {n: c for n, c in copies.items() if c}, _warn_unused(model, strangers, source))


def _rename(model: PreTrainedModel, tensors: Iterable[str], wanted: Mapping[str, Shape]) -> tuple[dict[str, str], list[str]]:
    """{name in the model: key in the files}, and the keys that no name of the model fits."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    prefix, names = model.base_model_prefix, dict(wanted)
    found: dict[str, str] = {}
    strangers = []
    for key in sorted(tensors, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        if pattern is not None and (name in names or _targets(converters, pattern, name) & names.keys()):
            raise UserError(
                f"the files keep the model's {name} in another form, which colrow does not convert",
                key,
                "load it in transformers and write it with save_pretrained(DIR, save_original_format=False)",
            )
        if name in names and name not in found:
            found[name] = key
        else:
            strangers.append(key)
    return found, strangers


def _targets(converters: list[WeightConverter], pattern: str, name: str) -> set[str]:
    """All names that the converter of `pattern` makes, given the first of them."""
    for converter in converters:
        if pattern in converter.source_patterns:
            first = converter.target_patterns[0]
            return {name.replace(first, target) for target in converter.target_patterns}
    return {name}


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


def _refuse_missing(missing: list[str], source: Source) -> None:
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
