"""What the whole model and the split one are both asked, and their answers: one code for the two, so that nothing but the split differs.

All outputs for a batch, loss and every gradient, cached decoding, one SGD and one AdamW step. The model is used as anyone would use a
transformers model: nothing here knows how it was split. What it is given is found out from itself (planning/inputs.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..planning.inputs import (
    CACHES,
    DECODED,
    PATCHES,
    TOKENS,
    Example,
    beside,
    cut_behind,
    encoded,
    fitting,
    moved,
    patches,
    places,
    rereads,
    takes,
)

IGNORED = -100  # the label that transformers' loss leaves out


@dataclass(frozen=True)
class Questions:
    """`inputs` (B rows) for outputs, loss and gradients, with `labels`; `prompt` (one row) for cached decoding of `steps` tokens (0: none).

    Without labels the loss is a random linear function of all outputs.
    """

    inputs: Example
    labels: torch.Tensor | None
    prompt: Example
    steps: int
    train: bool = True
    following: tuple[Example, ...] = ()  # what each new token comes with besides its id

    def to(self, model: nn.Module) -> Questions:
        device = next(model.parameters()).device
        labels = None if self.labels is None else self.labels.to(device)
        following = tuple(moved(example, device, model) for example in self.following)
        prompt = moved(self.prompt, device, model)
        return replace(self, inputs=moved(self.inputs, device, model), labels=labels, prompt=prompt, following=following)

    def briefly(self) -> Questions:
        """Without training, and just enough decoding to use the cache."""
        return replace(self, train=False, steps=min(self.steps, 3))

    def without_decoding(self) -> Questions:
        return replace(self, steps=0)


@dataclass(frozen=True)
class Answers:
    """`outputs` by name, `logits` (B, S, V) among them where there are any; `loss` a scalar, of `rows` rows of logits (None: not seen), or
    the mean of `losses` of them (one a codebook); `decoded` (steps, V): the logits before each token of `tokens`."""

    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None
    decoded: torch.Tensor
    tokens: tuple[int, ...]
    rows: int | None = None
    losses: int = 1


class _Rows(TorchFunctionMode):
    """Sees of how many rows of logits, with so many columns, a cross entropy is taken."""

    def __init__(self, columns: int | None) -> None:
        super().__init__()
        self.columns, self.found = columns, list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            scores = kwargs.get("input", args[0] if args else None)
            if scores.shape[-1] == self.columns:
                self.found.append(scores.shape[:-1].numel())
        return func(*args, **kwargs)


def questions(
    model: Any, batch: int = 2, length: int = 13, prompt: int = 7, steps: int = 6, seed: int = 1, train: bool = True
) -> Questions:
    """Inputs that the whole `model` takes. Token ids include the first and the last of the vocabulary (both ends of a cut), and some labels
    do not count. An encoder with a decoder behind it gets other lengths than the decoder."""
    inputs = fitting(model, batch, length, length + 3, seed)
    start = fitting(model, 1, prompt, prompt + 3, seed + 1)
    following: tuple[Example, ...] = ()
    if PATCHES in start:
        following = ({PATCHES: patches(1, 1)},) * steps
    elif beside(model.config, start):
        start, following = cut_behind(fitting(model, 1, prompt + steps, prompt + 3, seed + 1), prompt)
    decodes = _scores_tokens(model) and cache_name(model) is not None and not rereads(model)
    return Questions(inputs, _labels(model, inputs), start, steps if decodes else 0, train, following)


def _scores_tokens(model: Any) -> bool:
    """Whether its head gives the scores of the next token."""
    return model.get_output_embeddings() is not None and (DECODED in takes(model) or model.can_generate())


def _labels(model: Any, inputs: Example) -> torch.Tensor | None:
    if "labels" not in takes(model):
        return None
    ids = inputs.get(DECODED, inputs.get(TOKENS))
    if any("label" in name and name != "labels" for name in takes(model)):
        return None  # there is no loss without labels of another kind (next sentences)
    if ids is not None and model.get_output_embeddings() is not None:
        labels = ids.clone()
        labels[-1, : ids.shape[1] // 3] = IGNORED
        rows = len(inputs.get(TOKENS, ids))
        if len(ids) > rows:  # of several codebooks, which labels have side by side
            labels = labels.reshape(rows, -1, ids.shape[1]).transpose(1, 2)
            ids = ids.reshape(rows, -1, ids.shape[1]).transpose(1, 2)
        return labels.masked_fill(torch.isin(ids, torch.tensor(places(model.config), device=ids.device)), IGNORED)
    with torch.no_grad():
        logits = call(model, moved(inputs, next(model.parameters()).device, model)).get("logits")
    if logits is None or logits.dim() not in (2, 3) or logits.shape[-1] < 2:
        return None
    labels = torch.arange(logits.shape[:-1].numel()).reshape(logits.shape[:-1]) % logits.shape[-1]
    try:
        with torch.no_grad():
            loss = call(model, moved(inputs, logits.device, model), labels=labels.to(logits.device)).loss
    except Exception:  # a loss that wants other labels
        return None
    return labels if loss is not None and bool(torch.isfinite(loss)) else None


def call(model: Any, inputs: Example, **more: Any) -> Any:
    """The model's outputs for `inputs`, no token of which is padding. Without a cache unless `more` says otherwise."""
    known = takes(model)
    if "attention_mask" in known and TOKENS in inputs:
        more.setdefault("attention_mask", torch.ones_like(inputs[TOKENS]))
    if "use_cache" in known:
        more.setdefault("use_cache", False)
    return model(**inputs, **more)


def ask(
    model: nn.Module,
    asked: Questions,
    follow: tuple[int, ...] | None = None,
    phase: Callable[[str], None] = lambda name: None,
    slices: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Answers:
    """Runs the model; gradients are left in `.grad`. `follow` are the tokens to decode along (the whole model's), so that logits stay
    comparable after two models have chosen differently; by default the model's own. `phase` is told what begins; `slices` is entered for
    the loss."""
    asked = asked.to(model)
    phase("prefill")
    with torch.no_grad():
        outputs = dict(_floating(call(model, asked.inputs)))
    loss = None
    rows = _Rows(outputs["logits"].shape[-1] if "logits" in outputs else None)
    if asked.train:
        model.zero_grad(set_to_none=True)
        phase("train_forward")
        if asked.labels is None:
            loss = _linear(dict(_floating(call(model, asked.inputs))))
        else:
            with slices(), rows:
                loss = call(model, asked.inputs, labels=asked.labels).loss
        phase("train_backward")
        loss.backward()
        loss = loss.detach()
    decoded, tokens = _decode(model, asked, follow, phase) if asked.steps else (torch.empty(0, 0), ())
    phase("")
    return Answers(outputs, loss, decoded, tokens, next(iter(rows.found), None), max(len(rows.found), 1))


def _floating(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The floating tensors of nested outputs with dotted names; a loss and what is no tensor (a cache) left out."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and path != "loss":
            yield path, value
    elif isinstance(value, Mapping | tuple | list):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _floating(entry, f"{path}.{key}" if path else str(key))


def _linear(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A random linear function of all outputs, the same for the same shapes."""
    draw, total = torch.Generator().manual_seed(2), []
    for x in outputs.values():
        weight = torch.randn(x.shape, generator=draw).to(x) / max(x.numel(), 1) ** 0.5
        if x.requires_grad:
            total.append((x * weight).sum())
    return torch.stack(total).sum()


def _decode(
    model: nn.Module, asked: Questions, follow: tuple[int, ...] | None, phase: Callable[[str], None]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Greedy decoding with the cache. Ties go to the lowest id, as argmax does."""
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    name = cache_name(model) or ""
    given: dict[str, Any] = {}
    inputs = asked.prompt
    sequence = DECODED if DECODED in inputs else TOKENS
    with torch.no_grad():
        for step in range(asked.steps):
            phase("decode_prompt" if step == 0 else "decode")
            if step == 0 and sequence == DECODED and "encoder_outputs" in takes(model):  # else the encoder's states go in front, once
                mask = mask_after(asked.prompt, sequence, 0, None)
                inputs = {sequence: asked.prompt[sequence]}
                given = {"encoder_outputs": encoded(model, asked.prompt | mask), **mask}
            out = call(model, inputs, use_cache=True, **given)
            rows.append(out.logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
            if out.get(name) is None:
                break  # an encoder: it has no cache, and nothing to decode
            ids = asked.prompt[sequence].new_full((len(asked.prompt[sequence]), 1), tokens[-1] if follow is None else follow[step])
            inputs = {sequence: ids} | (asked.following[step] if asked.following else {})
            given |= {key: out[key] for key in out if key.endswith("_cache") and key in takes(model)}  # of an encoder that hears along
            given |= {name: out[name], **mask_after(asked.prompt, sequence, step + 1, out[name])}
    return torch.stack(rows), tuple(tokens)


def mask_after(prompt: Example, sequence: str, new: int, cache: Any) -> dict[str, Any]:
    """The mask of the step that follows `new` tokens behind the prompt: of the encoder's tokens, else of all tokens so far; none where the
    cache is a state without positions (Mamba, which would multiply the new token by every entry), and where pictures were among the tokens:
    such models count positions by themselves, and some by the mask instead where they get one."""
    if TOKENS not in prompt:
        return {}
    if sequence == TOKENS and (not _has_positions(cache) or prompt.keys() != {TOKENS}):
        return {"attention_mask": None}
    rows, length = prompt[TOKENS].shape
    return {"attention_mask": prompt[TOKENS].new_ones(rows, length if sequence == DECODED else length + new)}


def _has_positions(cache: Any) -> bool:
    try:
        return not hasattr(cache, "get_seq_length") or cache.get_seq_length() >= 0
    except ValueError:  # what transformers' caches without an attention layer say
        return False


def cache_name(model: nn.Module) -> str | None:
    """How this model calls its cache. None for a model without one."""
    return next((name for name in CACHES if name in takes(model)), None)


@dataclass(frozen=True)
class StepSizes:
    """Chosen from the whole model's numbers, used for both models."""

    sgd: float
    adamw: float
    eps: float


def step_sizes(model: nn.Module) -> StepSizes:
    """Steps that move a parameter by about a tenth of its size, so that a missing step stands far above rounding. AdamW's eps is the size
    of a gradient: with the usual 1e-8 its first step is lr * sign(gradient), which turns the rounding of a zero into a full step."""
    pairs = [(p.detach(), p.grad) for p in model.parameters() if p.grad is not None]
    count = sum(p.numel() for p, _ in pairs)
    size = math.hypot(*(float(torch.linalg.vector_norm(p.float())) for p, _ in pairs)) / math.sqrt(count)
    slope = math.hypot(*(float(torch.linalg.vector_norm(g.float())) for _, g in pairs)) / math.sqrt(count)
    return StepSizes(sgd=0.1 * size / slope, adamw=0.1 * size, eps=slope)


Reach = Callable[[float], float]
"""By how much a step moves an element whose gradient is that large."""


def optimizers(parameter: nn.Parameter, sizes: StepSizes) -> Iterator[tuple[str, torch.optim.Optimizer, float, Reach]]:
    """SGD, then AdamW: name, optimizer, how much faster than the gradient the step can change, and the step's reach."""
    yield "SGD", torch.optim.SGD([parameter], lr=sizes.sgd), sizes.sgd, lambda g: sizes.sgd * g
    adamw = torch.optim.AdamW([parameter], lr=sizes.adamw, eps=sizes.eps, weight_decay=0.1)
    yield "AdamW", adamw, sizes.adamw / sizes.eps, lambda g: sizes.adamw * g / (g + sizes.eps)
