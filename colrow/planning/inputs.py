"""What a model is called with, found out from the model itself: its main input, what its forward takes, its config. No weights.

`examples(model, ...)` yields dicts of tensors in the order in which they should be tried; a model of token ids has exactly one. What a
picture or a sound looks like to a model is a convention of transformers' arguments (a grid beside patches, tiles with an aspect ratio),
not of an architecture: each convention is tried where the forward takes its arguments, and last the text alone. The deriver traces the
first that can be followed (trace.py), the proofs ask the first that runs (`fitting`). Not here: labels and decoding (proof/exercise.py).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Container, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

Example = dict[str, torch.Tensor]

TOKENS, DECODED = "input_ids", "decoder_input_ids"
CACHES = ("cache", "past_key_values", "cache_params")
"""What models call their cache: transformers before 5.24 `past_key_values`, from then on `cache`; state space models `cache_params`."""
GRID = 2  # merged patches along each side of a picture whose size is free
FRAMES = 240  # of a spectrogram whose length is free
SOUND = "input_features"
PATCHES = "patch_lengths"  # of how many tokens in a row the model makes one vector; it finds them by its numbers where it is not told
HEARD = ("input_features_mask", "feature_attention_mask")  # which frames of a spectrogram are sound


def examples(model: Any, batch: int, length: int, source: int | None = None, seed: int = 1) -> Iterator[Example]:
    """Inputs of `batch` rows: `length` tokens, and `source` of them (default `length`) for an encoder that has a decoder behind it.

    Integers include both ends of the vocabulary. Where pictures stand among the tokens a row is longer than `length`.
    """
    return _Maker(model, batch, length, source or length, seed).examples()


def fitting(model: Any, batch: int, length: int, source: int | None = None, seed: int = 1) -> Example:
    """The first example that `model`, which has its weights, takes. Raises what the model raises for the first where it takes none."""
    found = list(examples(model, batch, length, source, seed))
    if len(found) == 1:
        return found[0]
    device, first = next(model.parameters()).device, None
    for example in found:
        try:
            with torch.no_grad():
                model(**moved(example, device, model))
            return example
        except Exception as error:  # a model refuses what it does not take with an error of any kind
            first = first or error
    raise first or TypeError(f"{type(model).__name__} takes no inputs that are known")


def moved(example: Example, device: torch.device, model: Any) -> Example:
    """On a device, floating ones in the model's dtype."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in example.items()}


def takes(model: Any) -> frozenset[str]:
    """Names of the arguments of the model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)


def encoded(model: Any, example: Example) -> Any:
    """What the encoder before a decoder makes of an example (and of its mask), as transformers' generate() calls it: alone, once."""
    encoder = model.get_encoder()
    known = takes(encoder)
    found = {name: x for name, x in example.items() if name in known and not name.startswith("decoder_")}
    return encoder(**found, return_dict=True)


def rereads(model: Any) -> bool:
    """Whether the model wants all tokens again in each step in spite of its cache (CPM-Ant), as its own preparation for generate() says."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    try:
        return bool(model.prepare_inputs_for_generation(ids, next_sequence_length=1)[TOKENS].shape == ids.shape)
    except Exception:  # prepares nothing, or wants to be told more
        return False


def beside(config: PreTrainedConfig, names: Container[str]) -> bool:
    """Whether, of inputs with these names, each token comes with a stretch of sound of its own, the next token too."""
    return TOKENS in names and SOUND in names and placed(config, "audio") is None


def patches(batch: int, tokens: int) -> torch.Tensor:
    """Lengths of patches: 1, sometimes 1 again, then 2 each."""
    return torch.tensor([[1, *[1] * ((tokens - 1) % 2), *[2] * ((tokens - 1) // 2)]] * batch)


def cut_behind(example: Example, tokens: int) -> tuple[Example, tuple[Example, ...]]:
    """Of an example in which each token has its own sound, the first `tokens`, and for each of the others its sound without its id."""
    count = example[TOKENS].shape[1]

    def part(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        dim = next(d for d in range(1, x.dim()) if x.shape[d] % count == 0)
        each = x.shape[dim] // count
        return x.narrow(dim, start * each, (stop - start) * each)

    first = {name: part(x, 0, tokens) for name, x in example.items()}
    others = {name: x for name, x in example.items() if name != TOKENS}
    return first, tuple({name: part(x, at, at + 1) for name, x in others.items()} for at in range(tokens, count))


def vocabulary(config: PreTrainedConfig, decoder: bool = False) -> int | None:
    """Number of token ids (of the decoder's, where those are others); None for a model without tokens."""
    try:
        text = config.get_text_config(decoder=True) if decoder and config.sub_configs else config.get_text_config()
    except ValueError:  # several texts of equal standing
        text = config
    found = getattr(text, "vocab_size", None)
    return found if isinstance(found, int) and found > 0 else None


def placed(config: PreTrainedConfig, what: str = "image") -> int | None:
    """The id that stands where features of a picture (`what` "audio": of a sound) are put in; None where a model has none."""
    names = (f"{what}_token_id", f"{what}_token_index")
    return next((v for name in names if isinstance(v := getattr(config, name, None), int)), None)


def places(config: PreTrainedConfig) -> tuple[int, ...]:
    """The ids that stand where something other than text is put in."""
    return tuple(id for what in ("image", "audio") if (id := placed(config, what)) is not None)


class _Maker:
    def __init__(self, model: Any, batch: int, length: int, source: int, seed: int) -> None:
        self.config: PreTrainedConfig = model.config
        self.main = model.main_input_name if isinstance(model.main_input_name, str) else model.main_input_name[0]
        self.takes = takes(model)
        self.patched = PATCHES in self.takes | takes(model.base_model)
        self.modalities = {model.input_modalities} if isinstance(model.input_modalities, str) else set(model.input_modalities)
        self.batch, self.length, self.source = batch, length, source
        self.draw = torch.Generator().manual_seed(seed)

    def examples(self) -> Iterator[Example]:
        if self.main == SOUND or self.main == "input_values":
            for sound in self._sounds():
                yield sound | self._decoded()
        elif "pixel_values" in self.takes and ("image" in self.modalities or self.main == "pixel_values"):
            if TOKENS not in self.takes:
                yield from self._pictures()
                return
            for picture in self._pictures():
                yield from self._with_text(picture)
            if self.main == TOKENS:
                yield self._text() | self._decoded()
        else:
            if SOUND in self.takes:
                place = placed(self.config, "audio")
                yield from self._beside() if place is None else self._heard(place)
            if self.patched:
                yield self._text() | {PATCHES: patches(self.batch, self.length)}
            yield self._text() | self._decoded()

    def _ids(self, length: int, size: int | None, books: int = 1) -> torch.Tensor:
        size = size or 2
        ids = torch.randint(0, size, (self.batch * books, length), generator=self.draw)
        ids[0, 0], ids[0, min(1, length - 1)] = 0, size - 1
        return ids

    def _text(self) -> Example:
        """Ids of the encoder where there is a decoder, else of the model. The places of pictures and sounds are not among them."""
        return {TOKENS: self._plain_ids(self.source if self._has_decoder() else self.length)}

    def _plain_ids(self, length: int) -> torch.Tensor:
        ids = self._ids(length, vocabulary(self.config))
        for place in places(self.config):
            ids = torch.where(ids == place, 1, ids)
        return ids

    def _has_decoder(self) -> bool:
        return self.config.is_encoder_decoder and DECODED in self.takes

    def _decoded(self) -> Example:
        """A decoder of sounds in several codebooks has a row of ids for each."""
        books = next((n for key, n in _ints(self.config) if key == "num_codebooks"), 1)
        return {DECODED: self._ids(self.length, vocabulary(self.config, decoder=True), books)} if self._has_decoder() else {}

    # sounds

    def _sounds(self) -> Iterator[Example]:
        """Spectrograms (batch, bands, frames) or (batch, frames, bands), and plain samples."""
        fixed = [n for key, n in _ints(self.config) if key == "max_source_positions"]
        frames = [*(2 * n for n in fixed), *fixed, 4 * self.source]  # two steps are made one, as a rule
        if self.main == "input_values":
            yield {self.main: self._floats(self.batch, 400 * self.source)}
            return
        for n, m in itertools.product(dict.fromkeys(frames), self._bands()):
            yield {self.main: self._floats(self.batch, m, n)}
            yield {self.main: self._floats(self.batch, n, m)}

    def _bands(self) -> list[int]:
        names = ("mel", "feat_per_channel", "feature_size", "input_dim")
        return list(dict.fromkeys(n for key, n in _ints(self.config) if any(name in key for name in names)))

    def _heard(self, place: int) -> Iterator[Example]:
        """A spectrogram and tokens, with as many places among the tokens as the sound has features. What makes the frames fewer is a
        model's own: strided layers, windows, several taken together."""
        fixed = [2 * n for key, n in _ints(self.config) if key in ("max_source_positions", "n_window")]
        for n, m in itertools.product(fixed or [FRAMES], self._bands()):
            masks = {name: torch.ones(self.batch, n, dtype=torch.long) for name in HEARD if name in self.takes}
            for mask, count in itertools.product([masks, {}] if masks else [{}], dict.fromkeys(-(-n // k) for k in self._fewer())):
                ids = self._among(count, place)
                yield {TOKENS: ids, SOUND: self._floats(self.batch, m, n)} | mask
                yield {TOKENS: ids, SOUND: self._floats(self.batch, n, m)} | mask

    def _beside(self) -> Iterator[Example]:
        """A spectrogram with as many frames to each token, where no id stands for a place of sound: features are added to the tokens'."""
        for each, m in itertools.product(self._fewer(), self._bands()):
            n = each * self.length
            yield self._text() | {SOUND: self._floats(self.batch, m, n)}
            yield self._text() | {SOUND: self._floats(self.batch, n, m)}

    def _fewer(self) -> list[int]:
        """How many frames may become one feature."""
        return list(dict.fromkeys([n for key, n in _ints(self.config) if "downsample" in key and 1 < n <= FRAMES] + [4, 8, 2]))

    def _among(self, count: int, place: int) -> torch.Tensor:
        """Rows of tokens of which `count` are the places of features."""
        ids = self._plain_ids(count + max(self.length - count, 3))
        ids[:, 2 : 2 + count] = place
        return ids

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw)

    # pictures

    def _pictures(self) -> Iterator[Example]:
        """One picture a row, in each convention whose arguments the forward takes."""
        vision = _with(self.config, "patch_size") or _with(self.config, "image_size")
        if vision is None:
            return
        channels = next((n for key in ("num_channels", "in_channels", "in_chans") if isinstance(n := getattr(vision, key, None), int)), 3)
        patch, size = _pair(getattr(vision, "patch_size", 1)), getattr(vision, "image_size", None)
        if "image_grid_thw" in self.takes:
            side = GRID * int(getattr(vision, "spatial_merge_size", 1))
            row = channels * int(getattr(vision, "temporal_patch_size", 1)) * patch[0] * patch[1]
            grid = torch.tensor([[1, side, side]] * self.batch)
            yield {"pixel_values": self._floats(self.batch * side * side, row), "image_grid_thw": grid}
        elif "spatial_shapes" in self.takes:
            shape = torch.tensor([[GRID, GRID]] * self.batch)
            mask = torch.ones(self.batch, GRID * GRID, dtype=torch.long)
            pixels = self._floats(self.batch, GRID * GRID, channels * patch[0] * patch[1])
            yield {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shape}
        elif size is not None:
            whole = (channels, *_pair(size))
            if "aspect_ratio_ids" in self.takes:
                tiles = int(getattr(vision, "max_num_tiles", 1))
                ratio = torch.ones(self.batch, 1, dtype=torch.long)
                mask = torch.ones(self.batch, 1, tiles, dtype=torch.long)
                pixels = self._floats(self.batch, 1, tiles, *whole)
                yield {"pixel_values": pixels, "aspect_ratio_ids": ratio, "aspect_ratio_mask": mask}
            else:
                yield {"pixel_values": self._floats(self.batch, *whole)}
                yield {"pixel_values": self._floats(self.batch, 1, *whole)}

    def _with_text(self, picture: Example) -> Iterator[Example]:
        """A picture and tokens: side by side, or with as many places among the tokens as the picture has features."""
        place = placed(self.config)
        if place is None or "aspect_ratio_ids" in picture:
            yield picture | self._text() | self._decoded() | self._seen(picture)
            return
        for count in self._places(picture):
            ids = self._among(count, place)
            marks = {name: (ids == place).long() for name in ("token_type_ids", "mm_token_type_ids") if name in self.takes}
            yield {TOKENS: ids} | picture | marks | self._decoded()

    def _seen(self, picture: Example) -> Example:
        """Every token looks at every tile."""
        if "cross_attention_mask" not in self.takes:
            return {}
        tiles = picture["aspect_ratio_mask"].shape[2]
        return {"cross_attention_mask": torch.ones(self.batch, self.length, 1, tiles, dtype=torch.long)}

    def _places(self, picture: Example) -> list[int]:
        """How many tokens a picture may stand for: what the config says, else its patches, or squares of them taken together."""
        said = [
            n for key, n in _ints(self.config) if "image" in key and ("token" in key or "seq" in key) and not key.endswith(("id", "index"))
        ]
        said += [n for key, n in _ints(self.config) if key == "mm_tokens_per_image"]
        if "image_grid_thw" in picture:
            return [GRID * GRID, *said]
        vision = _with(self.config, "patch_size")
        high, wide = (n // p for n, p in zip(picture["pixel_values"].shape[-2:], _pair(getattr(vision, "patch_size", 1)), strict=True))
        merged = [n for key, n in _ints(self.config) if ("scale" in key or "merge" in key) and n > 1]
        patches = [high * wide, *(high * wide // (n * n) for n in merged), high * wide + 1]
        fewer = [high * wide // n for n in (4, 16)]  # strides, and squares of which the config does not speak by such a name
        return [n for n in dict.fromkeys([*patches[1:-1], *said, patches[0], patches[-1], *fewer]) if 0 < n <= 4 * high * wide]


def _ints(config: Any) -> Iterator[tuple[str, int]]:
    """Every integer of a config and of the configs in it."""
    for key, value in vars(config).items():
        if type(value) is int:
            yield key, value
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _ints(getattr(config, name))


def _with(config: Any, name: str) -> Any:
    """The first of a config and the configs in it that has such an entry."""
    if getattr(config, name, None) is not None:
        return config
    inner = (getattr(config, sub, None) for sub in config.sub_configs)
    return next((found for one in inner if one is not None and (found := _with(one, name)) is not None), None)


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, list | tuple) else (int(size), int(size))
