"""The integers of a config as a search space: which there are, what smaller values to try, and a config with other values.

A config is handled as its dict, nested for composite models; nothing here knows what a field means, but for two conventions of
transformers: `vocab_size` and fields that end in `_token_id` or `_token_index`, which must stay below it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedConfig

Path = tuple[str, ...]
State = dict[str, Any]

MOST_OPTIONS = 8
SPECIAL = ("_token_id", "_token_index")


class Integers:
    """`state` is the config as given. States are never changed in place."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._type = type(config)
        self.state: State = _fields(config)

    def fields(self, state: State) -> list[Path]:
        """Every integer of at least 2 that can be a size, in the order of the config."""
        return [path for path, value in _walk(state) if type(value) is int and value >= 2 and not path[-1].endswith(SPECIAL)]

    def value(self, state: State, path: Path) -> int:
        return _at(state, path[:-1])[path[-1]]

    def with_values(self, state: State, values: dict[Path, int]) -> State:
        """The state with other values; ids of special tokens that no longer exist become the last ones of the vocabulary."""
        out = copy.deepcopy(state)
        for path, value in values.items():
            _at(out, path[:-1])[path[-1]] = value
        vocabulary = min((v for path, v in _walk(out) if path[-1] == "vocab_size" and type(v) is int), default=None)
        if vocabulary is not None:
            ids = [(path, value) for path, value in _walk(out) if path[-1].endswith(SPECIAL)]
            beyond = sorted({i for _, value in ids for i in _listed(value) if i >= vocabulary}, reverse=True)
            new = {i: max(vocabulary - 1 - at, 0) for at, i in enumerate(beyond)}  # those of pictures and of padding stay different
            for path, value in ids:
                _at(out, path[:-1])[path[-1]] = _renamed(value, new)
        return out

    def with_depth(self, state: State, path: Path, depth: int, layers: Iterable[int]) -> State:
        """The state with only `layers` of the `depth` layers that `path` counts: lists with one entry a layer are cut alike."""
        kept = list(layers)
        out = self.with_values(state, {path: len(kept)})
        for at, value in list(_walk(out)):
            if value == list(range(depth)):  # not something of each layer, but the numbers of them all
                _at(out, at[:-1])[at[-1]] = list(range(len(kept)))
            elif isinstance(value, list) and len(value) == depth:
                _at(out, at[:-1])[at[-1]] = [value[i] for i in kept]
            elif _by_layer(value):
                own = {int(k): v for k, v in value.items()}
                _at(out, at[:-1])[at[-1]] = {str(new): own[old] for new, old in enumerate(kept) if old in own}
        return out

    def per_layer(self, state: State, depth: int) -> list[tuple[str, ...]]:
        """For each of `depth` layers, what lists of that length in the config say about it."""
        lists = [value for _, value in _walk(state) if isinstance(value, list) and len(value) == depth and value != list(range(depth))]
        own = ({int(k): v for k, v in value.items()} for _, value in _walk(state) if _by_layer(value))
        lists += [[entries.get(i) for i in range(depth)] for entries in own]
        return [tuple(repr(entries[i]) for entries in lists) for i in range(depth)]

    def config(self, state: State) -> PreTrainedConfig:
        """A config from a state; raises whatever the config's own checks raise."""
        return self._type.from_dict(copy.deepcopy(state))

    def try_config(self, state: State) -> PreTrainedConfig | None:
        try:
            return self.config(state)
        except Exception:  # configs refuse bad values with errors of any kind
            return None

    def changes(self, state: State) -> tuple[tuple[str, Any, Any], ...]:
        """(dotted field, old, new) of the integers that differ."""
        before = dict(_walk(self.state))
        return tuple(
            (".".join(path), before[path], value)
            for path, value in _walk(state)
            if type(value) is int and before[path] != value and not path[-1].endswith(SPECIAL)
        )


def _fields(config: PreTrainedConfig) -> State:
    """The config's dict with the numbers of its fields: there are configs that write others to files (Dory: two blocks for each layer)."""
    out, own = config.to_dict(), vars(config)
    for key, written in out.items():
        value = own.get(key)
        if isinstance(value, PreTrainedConfig):
            out[key] = _fields(value)
        elif type(value) in (int, list) and value != written:
            out[key] = copy.deepcopy(value)
    return out


def _walk(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every field of nested configs. A dict by number of layer is a value."""
    for key, value in state.items():
        if isinstance(value, dict) and not _by_layer(value):
            yield from _walk(value, (*path, key)) if all(isinstance(k, str) for k in value) else ()
        else:
            yield (*path, key), value


def _by_layer(value: Any) -> bool:
    """Whether this is a dict of what some layers have of their own, by their numbers (as ints, or as strings after JSON)."""
    return isinstance(value, dict) and bool(value) and all(str(k).isdigit() and isinstance(v, dict) for k, v in value.items())


def _at(state: State, path: Path) -> State:
    for key in path:
        state = state[key]
    return state


def _listed(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]


def _renamed(value: Any, new: dict[int, int]) -> Any:
    if isinstance(value, list):
        return [_renamed(v, new) for v in value]
    return new.get(value, value) if type(value) is int else value


def candidates(n: int, floor: int, ranks: int) -> list[int]:
    """Smaller values for a size `n`, ascending, all at least `floor` and at least `ranks`.

    Quotients n / d keep what n divides by; they must divide by the number of ranks if and only if n does. Where n has no small quotient
    (a prime vocabulary), a number of the same remainder by the ranks and by 2.
    """
    least = max(floor, ranks)
    quotients = sorted(n // d for d in _divisors(n) if d > 1 and n // d >= least and ((n // d) % ranks == 0) == (n % ranks == 0))
    if not quotients or quotients[0] >= 4 * least:
        step = math.lcm(2, ranks)
        alike = least + (n - least) % step
        quotients = [alike, *quotients] if alike < n else quotients
    return quotients[:MOST_OPTIONS]


def _divisors(n: int) -> set[int]:
    return {d for small in range(1, math.isqrt(n) + 1) if n % small == 0 for d in (small, n // small)}
