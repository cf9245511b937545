"""Which transformers class a config means, and how a model of it is built. No architecture is known here by name.

A config that was saved with a model names the model's class (`architectures`), and that class it is: a checkpoint may hold a classifier, a
text encoder alone, a model that sees. A config that names none gets the class of transformers' auto classes that says most about it: one
with a language model's head where there is one. Not here: weights, inputs (inputs.py).
"""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache

from ..errors import UserError
from .inputs import CACHES

GENERATORS: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
TRANSLATORS: tuple[Any, ...] = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
ENCODERS: tuple[Any, ...] = (AutoModelForMaskedLM, AutoModelForImageClassification)
SEERS: tuple[Any, ...] = (AutoModelForImageTextToText, *GENERATORS, AutoModelForMaskedLM)


BUILDING = threading.RLock()  # transformers sets torch's default dtype while it builds a model, for all threads


def model_class(config: PreTrainedConfig) -> Any:
    """The class to build: that which the config names, else an auto class of transformers."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel) and named.config_class is type(config):
            return named
    remote = getattr(config, "auto_map", None) or {}
    auto = next((auto for auto in _order(config) if type(config) in auto._model_mapping or auto.__name__ in remote), AutoModel)
    several = auto._model_mapping.get(type(config), None)
    return several[0] if isinstance(several, tuple) else auto  # an auto class builds none of several without a config that names it


def _order(config: PreTrainedConfig) -> tuple[Any, ...]:
    """An encoder-decoder is one although its decoder alone has a class too, and a model of several towers although one of them has; an
    encoder (`is_decoder` False) is no causal model."""
    if config.is_encoder_decoder:
        return (*TRANSLATORS, *GENERATORS, *ENCODERS)
    if config.sub_configs:
        return SEERS
    return (*ENCODERS, *GENERATORS) if getattr(config, "is_decoder", None) is False else (*GENERATORS, *ENCODERS)


def concrete_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """As `model_class`, an auto class resolved; None where the class comes with the model's files."""
    cls = model_class(config)
    if issubclass(cls, PreTrainedModel):
        return cls
    found = cls._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def generates(config: PreTrainedConfig) -> bool:
    """Whether the model decodes: token after token, with a cache."""
    cls = concrete_class(config)
    return cls is None or cls.can_generate()


def require_text(config: PreTrainedConfig, what: str, translators: bool = False) -> None:
    """UserError where `what` (a command) cannot be done with the model: it makes no text, not from text, or (without `translators`) reads
    its prompt with an encoder and writes with a decoder."""
    cls = concrete_class(config)
    if cls is None:
        return
    if not cls.can_generate():
        raise UserError(f"{what} needs a model that generates text", cls.__name__, "colrow plan MODEL and colrow verify MODEL")
    if cls.main_input_name != "input_ids":
        works = f"colrow plan MODEL and colrow verify MODEL; in Python, colrow.load(...).generate({cls.main_input_name}=...)"
        raise UserError(f"{what} gives a model text, and this one takes {cls.main_input_name}", cls.__name__, works)
    if config.is_encoder_decoder and not translators:
        raise UserError(
            f"{what} needs a decoder alone, this model has an encoder too", cls.__name__, "colrow run, or colrow.load(...) in Python"
        )


def routed(model: Any) -> list[PreTrainedModel]:
    """Those of the models in it (itself, its towers) whose way of computing experts can be chosen. A model around a text model with experts
    says of itself that it cannot."""
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and m._can_set_experts_implementation()]


def compute_experts(model: Any, way: str) -> None:
    """`way` as transformers' `experts_implementation`, in every model that has experts; also where a layer has a config of its own."""
    for part in routed(model):
        part.set_experts_implementation(way)
        for config in (getattr(module, "config", None) for module in part.modules()):
            if type(config) is type(part.config):
                config._experts_implementation = way


def state_in_modules(model: nn.Module) -> bool:
    """Whether modules of the model keep a state themselves, beside any cache: that of one sequence (RecurrentGemma)."""
    return any(hasattr(m, "_setup_cache") for m in model.modules() if not isinstance(m, PreTrainedModel))


def keeps_state(model: PreTrainedModel, arguments: dict[str, torch.Tensor]) -> bool:
    """Whether the sizes of a cache come from integers: of modules that keep a state themselves, or of a class of the model's own (xLSTM).
    transformers' caches take the sizes of what is put in."""
    if state_in_modules(model):
        return True
    if not model._is_stateful or "use_cache" not in inspect.signature(model.forward).parameters:
        return False
    try:
        with torch.no_grad():
            out = model(**arguments, use_cache=True)
    except Exception:  # it needs numbers
        return False
    cache = next((out[name] for name in CACHES if out.get(name) is not None), None)
    return cache is not None and not isinstance(cache, Cache | tuple | list)


def build(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model with fresh weights on the current default device. `options` as transformers' `from_config` takes them."""
    cls = model_class(config)
    make = cls._from_config if issubclass(cls, PreTrainedModel) else cls.from_config
    with BUILDING:
        return make(copy.deepcopy(config), **options)


def is_table(cls: type) -> bool:
    """nn.Embedding, or a class of a model's own that leaves the lookup to it (scaled word embeddings, shifted positions).

    >>> is_table(nn.Embedding), is_table(nn.EmbeddingBag)
    (True, False)
    """
    if not issubclass(cls, nn.Embedding):
        return False
    own = [c.__dict__["forward"] for c in cls.__mro__[: cls.__mro__.index(nn.Embedding)] if "forward" in c.__dict__]
    return all("super" in f.__code__.co_names and "embedding" not in f.__code__.co_names for f in own)
