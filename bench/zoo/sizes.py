"""A tiny config of any architecture, from its config class's own defaults: sizes that break the usual symmetries.

What an integer counts is read from its field's name, by conventions that transformers' configs share (`*_heads`, `*intermediate_size`,
`*experts_per_tok`): one table for all architectures, and no architecture in it. The first of a few shapes that builds and runs is taken;
the odd one first: heads x head_dim differs from the hidden size, 9 query and 3 KV heads, so that no number of ranks divides them all.
What is still large then is made smaller by trying (colrow/proof/integers.py). What cannot be had in this way is in odd.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from colrow.planning.trace import TraceError, trace
from colrow.proof.integers import Integers, Path, State, _at, _walk, candidates
from colrow.proof.probe import Shapes, shapes

from .odd import FIELDS
from .runs import runs

VOCABULARY, LAYERS = 101, 2
OPEN = (
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
)  # set where a class leaves them open
LARGE = 96  # a size above this is made smaller by trying
ENOUGH = 400_000  # parameters: below this nothing more is tried


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads, head size, hidden size and inner size of a tiny model."""

    heads: int
    kv: int
    head_dim: int
    hidden: int
    inner: int


SHAPES = (
    Shape(9, 3, 8, 40, 51),
    Shape(9, 3, 8, 72, 51),  # where the hidden size must be heads x head_dim
    Shape(9, 3, 8, 36, 51),  # where heads x head_dim must be twice the hidden size (state space layers)
    Shape(12, 4, 8, 96, 52),  # where heads must be even
    Shape(9, 9, 8, 72, 51),  # where every query head has a KV head of its own
    Shape(8, 8, 16, 128, 64),
    Shape(8, 2, 16, 128, 64),
)


def rules(s: Shape, vocabulary: int = VOCABULARY) -> list[tuple[str, int]]:
    """(pattern of a whole field name, value): the first that matches counts."""
    return [
        (r".*type_vocab_size", 2),
        (r".*vocab_size.*", vocabulary),
        (r"num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers|num_(en|de)coder_layers|depth", LAYERS),
        (r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_(source|target)_positions|context_length", 32),
        (r"image_size", 32),
        (r"patch_size", 8),
        (r"mm_tokens_per_image", 4),
        (r"first_k_dense_replace|num_dense_layers", 1),
        (r".*(experts_per_tok|experts_per_token|moe_topk|moe_top_k|top_k_experts)", 2),
        (r".*shared_experts", 1),
        (r"(moe_)?(n_routed|num|num_local)_experts|moe_num_experts", 4),
        (r"moe_k", 2),
        (r"num_kv_shared_layers", 0),
        (r"rotary_dim", 4),
        (r"mamba_n_heads|n_mamba_heads|mamba_num_heads", s.heads),
        (r"mamba_d_head|mamba_head_?dim", s.head_dim),
        (r"mamba_d_ssm", s.heads * s.head_dim),
        (r"(mamba_)?n_groups|mamba_ngroups", 3),
        (r"mamba_d_state|state_size|ssm_state_size", 8),
        (r"n_group|num_expert_group", 2),
        (r"topk_group", 1),
        (r"qk_rope_head_dim", 8),
        (r"qk_nope_head_dim|qk_head_dim_nope", 16),
        (r"v_head_dim", 12),
        (r"qk_head_dim", 24),
        (r"q_lora_rank|o_lora_rank", 16),
        (r"kv_lora_rank", 8),
        (r"index_head_dim", 16),
        (r"index_n_heads", 4),
        (r"index_topk", 4),
        (r"linear_num_key_heads", 3),
        (r"linear_num_value_heads", 9),
        (r"linear_(key|value)_head_dim", 8),
        (r"(num_|n_)?(key_value|kv)_heads|n_head_kv|num_query_groups|.*_key_value_heads|.*_kv_heads", s.kv),
        (r"(num_|n_)?(attention_)?heads?|.*_attention_heads|n_heads?", s.heads),
        (r"head_dim|attention_head_dim|d_kv|kv_channels|d_head|dim_head|attention_head_size|.*_head_dim", s.head_dim),
        (r"(moe|expert|shared_expert|shared)_(ffn_hidden|intermediate)_size|moe_shared_expert_intermediate_size", 21),
        (r".*(intermediate_size|ffn_dim|ffn_hidden_size|intermediate_size_mlp)|d_ff|dff|dim_ff|n_inner|feed_forward_size", s.inner),
        (
            r"hidden_size|out_hidden_size|d_model|n_embd|dim|emb_dim|embedding_dim|d_embed|embed_dim|.*embedding_size|word_embed_proj_dim",
            s.hidden,
        ),
        (r"sliding_window(_size)?|local_attention|attention_window_size", 4),
    ]


def config(architecture: str) -> PreTrainedConfig:
    """The tiny config. LookupError, with the last reason, where no shape builds and runs. Of a model of several towers the first in which
    all of them can be followed; the first that runs where there is none."""
    default = CONFIG_MAPPING[architecture]()
    why, first = "no integers", None
    for shape in SHAPES:
        found, why = _attempt(default, shape, FIELDS.get(architecture, {}))
        if found is not None and (not found.sub_configs or _followed(found)):
            return found
        first = first or found
    if first is None:
        raise LookupError(why)
    return first


def _attempt(default: PreTrainedConfig, shape: Shape, fields: dict[str, Any]) -> tuple[PreTrainedConfig | None, str]:
    integers = Integers(default)
    state = _fewer_layers(integers, _by_name(integers, integers.state, shape))
    for name, value in fields.items():
        *path, last = name.split(".")
        _at(state, tuple(path))[last] = value
    try:
        made = integers.config(state)
        found = shapes(made)
    except Exception as error:  # configs and models refuse sizes with errors of any kind
        return None, _first_line(error)
    state, found = _smaller(integers, state, found, {tuple(name.split(".")) for name in fields})
    made = integers.config(state)
    why = runs(made)
    return (None, why) if why else (made, "")


def _followed(config: PreTrainedConfig) -> bool:
    """Whether pictures and sounds, where the model takes any, could be followed through it."""
    try:
        return not trace(config).left_out
    except TraceError:
        return True  # it cannot be followed at all, in any size


def _by_name(integers: Integers, state: State, shape: Shape) -> State:
    """Every integer, and every size that the config leaves open, by its name."""
    out = integers.with_values(state, {})
    wider = replace(shape, head_dim=2 * shape.head_dim)
    for own in (v for _, by_layer in _walk(out) if isinstance(by_layer, dict) for v in by_layer.values()):  # what some layers have instead
        own.update((k, _named(k, wider) or v) for k, v in own.items() if type(v) is int)
    for path, value in list(_walk(out)):
        if (type(value) is int and value >= 2) or (value is None and path[-1] in OPEN):
            wanted = _named(path[-1], shape)
            if wanted is not None and not path[-1].endswith("_token_id"):
                _at(out, path[:-1])[path[-1]] = wanted
    return integers.with_values(out, {})  # ids of tokens follow the vocabulary


def _named(field: str, shape: Shape) -> int | None:
    return next((n for pattern, n in rules(shape) if re.fullmatch(pattern, field)), None)


def _fewer_layers(integers: Integers, state: State) -> State:
    """Lists with an entry for each layer keep one of each kind; the number of layers is theirs."""
    for path in [p for p, v in _walk(integers.state) if re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", p[-1]) and type(v) is int]:
        depth = integers.value(integers.state, path)
        said = integers.per_layer(integers.state, depth)
        firsts = sorted({entry: i for i, entry in reversed(list(enumerate(said)))}.values())
        kept = sorted({*firsts, *range(min(LAYERS, depth))} if len(firsts) < LAYERS else firsts)
        state = integers.with_values(state, {path: depth})
        state = integers.with_depth(state, path, depth, kept)
    return state


def _smaller(integers: Integers, state: State, found: Shapes, fixed: set[Path]) -> tuple[State, Shapes]:
    """Halves what is still large and not `fixed`, one field after the other, as long as the same parameters are there."""
    for path in sorted(integers.fields(state), key=lambda p: -integers.value(state, p)):
        n = integers.value(state, path)
        if n <= LARGE or path in fixed or found.elements <= ENOUGH:
            continue
        for fewer in candidates(n, 16, 3):
            changed = integers.with_values(state, {path: fewer})
            try:
                after = shapes(integers.config(changed))
            except Exception:
                continue
            if after.names == found.names and after.elements < found.elements:
                state, found = changed, after
                break
    return state, found


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
