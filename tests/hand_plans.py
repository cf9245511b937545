"""Megatron's plan for Llama, Qwen2 and GPT-2, written down by hand from the config: an independent check of the derived plans. In one
point colrow does more: positions are cut like tokens, and share their all-reduce.

Query heads are balanced over the ranks; each rank holds the KV heads that its query heads use, so the ranges of two ranks may overlap. MLP
and vocabulary are cut evenly. Nothing here looks at a model's code or weights; names are spelled out as the checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config

from colrow.partition import Partition, balance, merge_ranges, whole
from colrow.planning.plan import Attention, Edit, Plan, Region, TensorPlan

Weights = Sequence[float] | None


def hand_plan(config: PreTrainedConfig, ranks: int, weights: Weights = None) -> Plan:
    if isinstance(config, GPT2Config):
        return _gpt2(config, ranks, weights)
    assert isinstance(config, LlamaConfig | Qwen2Config)
    return _llama(config, ranks, weights)


def cut(dim: int, size: int, ranks: int, weights: Weights = None) -> Partition:
    return Partition(dim, tuple(((a, b),) if b > a else () for a, b in balance(size, ranks, weights)))


def scaled(heads: Partition, width: int, dim: int = 0, copies: int = 1) -> Partition:
    """The partition of features from one of heads of `width` features each; `copies` such blocks lie behind each other (fused q|k|v)."""
    block = heads.size * width
    pieces = [[(c * block + a * width, c * block + b * width) for c in range(copies) for a, b in ranges] for ranges in heads.pieces]
    return Partition(dim, tuple(merge_ranges(ranges) for ranges in pieces))


def head_cut(heads: int, kv_heads: int, ranks: int, weights: Weights = None) -> tuple[Partition, Partition, tuple[int, ...]]:
    """Query heads balanced, and the KV heads that they use: 9 and 3 heads on 2 ranks give 0-5, 5-9 and 0-2, 1-3."""
    kv_of = tuple(h * kv_heads // heads for h in range(heads))
    query = cut(0, heads, ranks, weights)
    kv = tuple(tuple((kv_of[a], kv_of[b - 1] + 1) for a, b in ranges) for ranges in query.pieces)
    return query, Partition(0, kv), kv_of


def _llama(config: LlamaConfig | Qwen2Config, ranks: int, weights: Weights) -> Plan:
    h, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    dim = getattr(config, "head_dim", None) or h // config.num_attention_heads
    query, kv, kv_of = head_cut(config.num_attention_heads, config.num_key_value_heads, ranks, weights)
    qwen = isinstance(config, Qwen2Config)
    qkv_bias, o_bias = (True, False) if qwen else (config.attention_bias, config.attention_bias)
    mlp_bias = False if qwen else config.mlp_bias
    rows, features = cut(0, vocab, ranks, weights), cut(0, inner, ranks, weights)
    out = _Parts(ranks)
    out.vocab("model.embed_tokens", (vocab, h), rows, tied="lm_head.weight" if config.tie_word_embeddings else "")
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        for name, heads, count in (("q", query, query.size), ("k", kv, kv.size), ("v", kv, kv.size)):
            out.linear(f"{at}.self_attn.{name}_proj", (count * dim, h), "column", scaled(heads, dim), qkv_bias)
        out.linear(f"{at}.self_attn.o_proj", (h, query.size * dim), "row", scaled(query, dim, dim=1), o_bias)
        for name in ("gate", "up"):
            out.linear(f"{at}.mlp.{name}_proj", (inner, h), "column", features, mlp_bias)
        out.linear(f"{at}.mlp.down_proj", (h, inner), "row", Partition(1, features.pieces), mlp_bias)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out.norm(f"{at}.{name}", h, ("weight",))
        out.attention.append(Attention(f"{at}.self_attn", query, kv, kv_of, dim, "heads"))
    out.norm("model.norm", h, ("weight",))
    if not config.tie_word_embeddings:
        out.linear("lm_head", (vocab, h), "column", rows, False)
    return out.plan(config, "Qwen2ForCausalLM" if qwen else "LlamaForCausalLM", rows, weights)


def _gpt2(config: GPT2Config, ranks: int, weights: Weights) -> Plan:
    h, vocab = config.n_embd, config.vocab_size
    inner = config.n_inner or 4 * h
    dim = h // config.n_head
    query, _, kv_of = head_cut(config.n_head, config.n_head, ranks, weights)
    rows, features = cut(0, vocab, ranks, weights), cut(0, inner, ranks, weights)
    out = _Parts(ranks, transposed=True)
    out.vocab("transformer.wte", (vocab, h), rows, tied="lm_head.weight" if config.tie_word_embeddings else "")
    out.tensor("transformer.wpe.weight", (config.n_positions, h), cut(0, config.n_positions, ranks, weights), "vocab")
    due = replace(out.regions.pop(), module="transformer.drop", place="input", arg="input")
    out.regions += [replace(due, module=f"transformer.{t}", place="output", arg="0", op="hold", shares=due.name) for t in ("wte", "wpe")]
    out.regions[-1] = replace(out.regions[-1], shape=(1, "S", h))
    out.regions.append(due)
    for i in range(config.n_layer):
        at = f"transformer.h.{i}"
        fused = scaled(query, dim, copies=3)
        out.linear(f"{at}.attn.c_attn", (3 * h, h), "column", fused, True)
        out.linear(f"{at}.attn.c_proj", (h, h), "row", scaled(query, dim, dim=1), True)
        out.linear(f"{at}.mlp.c_fc", (inner, h), "column", features, True)
        out.linear(f"{at}.mlp.c_proj", (h, inner), "row", Partition(1, features.pieces), True)
        out.norm(f"{at}.ln_1", h, ("weight", "bias"))
        out.norm(f"{at}.ln_2", h, ("weight", "bias"))
        local = tuple(query.local_size(rank) * dim for rank in range(ranks))
        out.edits.append(Edit(f"{at}.attn", "split_size", h, local, "q, k and v are split by this size"))
        out.attention.append(Attention(f"{at}.attn", query, query, kv_of, dim, "heads"))
    out.norm("transformer.ln_f", h, ("weight", "bias"))
    if not config.tie_word_embeddings:
        out.transposed = False
        out.linear("lm_head", (vocab, h), "column", rows, False)
    return out.plan(config, "GPT2LMHeadModel", rows, weights)


class _Parts:
    """What a plan is made of, collected part by part. Shapes are given as nn.Linear stores them; `transposed` layers swap dims 0 and 1."""

    def __init__(self, ranks: int, transposed: bool = False) -> None:
        self.ranks, self.transposed = ranks, transposed
        self.tensors: dict[str, TensorPlan] = {}
        self.regions: list[Region] = []
        self.edits: list[Edit] = []
        self.attention: list[Attention] = []

    def tensor(self, name: str, shape: tuple[int, ...], partition: Partition, role: str, tied: str = "") -> None:
        self.tensors[name] = TensorPlan(name, shape, partition, role, "by hand", aliases=(tied,) if tied else ())

    def region(self, module: str, op: str, width: int) -> None:
        self.regions.append(Region(module, "output", "0", op, ("B", "S", width), "by hand"))

    def vocab(self, module: str, shape: tuple[int, int], partition: Partition, tied: str) -> None:
        self.tensor(f"{module}.weight", shape, partition, "vocab", tied)
        self.region(module, "reduce", shape[1])

    def linear(self, module: str, shape: tuple[int, int], role: str, partition: Partition, bias: bool) -> None:
        if self.transposed:
            shape_, partition_ = (shape[1], shape[0]), Partition(1 - partition.dim, partition.pieces)
        else:
            shape_, partition_ = shape, partition
        self.tensor(f"{module}.weight", shape_, partition_, role)
        if bias:
            of_bias = Partition(0, partition.pieces) if role == "column" else whole(self.ranks)
            self.tensor(f"{module}.bias", (shape[0],), of_bias, "column" if role == "column" else "whole")
        if role == "row":
            self.region(module, "reduce", shape[0])

    def norm(self, module: str, width: int, keys: tuple[str, ...]) -> None:
        for key in keys:
            self.tensor(f"{module}.{key}", (width,), whole(self.ranks), "whole")
        self.region(module, "copy", width)

    def plan(self, config: PreTrainedConfig, architecture: str, rows: Partition, weights: Weights) -> Plan:
        logits = Partition(-1, rows.pieces)
        self.regions.append(Region("", "output", "logits", "gather", ("B", "S", config.vocab_size), "by hand", logits))
        return Plan(
            config.model_type,
            architecture,
            self.ranks,
            self.tensors,
            tuple(self.regions),
            tuple(self.edits),
            tuple(self.attention),
            weights=tuple(weights or ()),
        )
