"""Which transformers class a config means, and how a model of it is built. No architecture is known here by name.

A config that was saved with a model names the model's class (`architectures`), and that class it is: a checkpoint may hold a classifier, a
text encoder alone, a model that sees. A config that names none gets the class of transformers' auto classes that says most about it: one
with a language model's head where there is one. Not here: weights, inputs (inputs.py).
"""

from __future__ import annotations

import copy
from typing import Any

import transformers
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

GENERATORS: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
TRANSLATORS: tuple[Any, ...] = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)
ENCODERS: tuple[Any, ...] = (AutoModelForMaskedLM, AutoModelForImageClassification)
SEERS: tuple[Any, ...] = (AutoModelForImageTextToText, *GENERATORS, AutoModelForMaskedLM)


def model_class(config: PreTrainedConfig) -> Any:
    """The class to build: that which the config names, else an auto class of transformers."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel) and named.config_class is type(config):
            return named
    remote = getattr(config, "auto_map", None) or {}
    return next((auto for auto in _order(config) if type(config) in auto._model_mapping or auto.__name__ in remote), AutoModel)


def _order(config: PreTrainedConfig) -> tuple[Any, ...]:
    """An encoder-decoder is one although its decoder alone has a class too, and a model of several towers although one of them has; an
    encoder (`is_decoder` False) is no causal model."""
    if config.is_encoder_decoder:
        return (*TRANSLATORS, *GENERATORS, *ENCODERS)
    if config.sub_configs:
        return SEERS
    return (*ENCODERS, *GENERATORS) if getattr(config, "is_decoder", None) is False else (*GENERATORS, *ENCODERS)


def build(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model with fresh weights on the current default device. `options` as transformers' `from_config` takes them."""
    cls = model_class(config)
    make = cls._from_config if issubclass(cls, PreTrainedModel) else cls.from_config
    return make(copy.deepcopy(config), **options)
