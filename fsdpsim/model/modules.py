"""The module tree of a model: which module owns which parameter, in forward order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdpsim.model.config import ModelConfig
from fsdpsim.workload import Param

#: family -> where its modules live: (blocks, token embedding, position embedding, final norm).
_PATHS = {
    "gpt2": ("transformer.h", "transformer.wte", "transformer.wpe", "transformer.ln_f"),
    "mpt": ("transformer.blocks", "transformer.wte", "transformer.wpe", "transformer.norm_f"),
}
_LLAMA_PATHS = ("model.layers", "model.embed_tokens", "", "model.norm")

HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One ``nn.Module`` of ``named_modules()``, with the parameters that it owns itself."""

    name: str
    """Fully qualified name."""
    kind: str
    """``block``, ``attention``, ``mlp``, ``norm``, ``linear``, ``experts`` or ``embedding``."""
    sublayer: str = ""
    """Within a block: ``attention`` or ``mlp``; a norm belongs to the sublayer that it feeds."""
    params: tuple[Param, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A module of a block, named relative to the block; the shapes of its parameters by name."""

    path: str
    kind: str
    sublayer: str = ""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()


def block_path(config: ModelConfig) -> str:
    """Fully qualified name of the list of blocks: ``model.layers``, ``transformer.h``, ..."""
    return _PATHS.get(config.model_type, _LLAMA_PATHS)[0]


def embedding_paths(config: ModelConfig) -> tuple[str, ...]:
    """Names of the token embedding and, when learned, the position embedding."""
    _, tokens, positions, _ = _PATHS.get(config.model_type, _LLAMA_PATHS)
    return (tokens, positions) if config.learned_pos_emb else (tokens,)


def final_norm_path(config: ModelConfig) -> str:
    """Name of the norm between the last block and the head."""
    return _PATHS.get(config.model_type, _LLAMA_PATHS)[3]


def modules(config: ModelConfig, dtype: str = "float32") -> tuple[Module, ...]:
    """Every module that FSDP could wrap, in forward order, containers before their children.

    ``dtype`` is the original dtype of the parameters. A tied head owns no parameter, and MPT's,
    which is no module at all, is listed as ``lm_head`` too.
    """
    return (
        *_embeddings(config, dtype),
        *_blocks(config, dtype),
        _module(
            Template(
                path=final_norm_path(config), kind="norm", shapes=_norm(config, config.hidden_size)
            ),
            "",
            dtype,
        ),
        _module(_head(config), "", dtype),
    )


def parameters(config: ModelConfig, dtype: str = "float32") -> tuple[Param, ...]:
    """Every parameter once, with the names and shapes of ``named_parameters()``.

    Shapes are those of torch's modules: a linear is (out, in), GPT-2's ``Conv1D`` (in, out), and
    each expert of a mixture has its own tensors (transformers 4; version 5 stacks them).
    """
    return tuple(p for module in modules(config, dtype) for p in module.params)


def matmul_parameters(config: ModelConfig, *, active: bool = True) -> int:
    """Elements that multiply every token: all linear layers and the head, tied or not.

    With ``active`` only ``num_experts_per_tok`` experts of a mixture count.
    """
    per_block = sum(
        _numel(t) * (_active_share(config, t) if active else 1)
        for t in block_templates(config)
        if t.kind in ("linear", "experts")
    ) - _biases(config)
    return int(per_block) * config.num_hidden_layers + config.vocab_size * config.hidden_size


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token uses: all of a dense model, the chosen experts of a mixture."""
    total = sum(p.numel for p in parameters(config))
    idle = sum(_numel(t) - _numel(t) * _active_share(config, t) for t in block_templates(config))
    return total - int(idle) * config.num_hidden_layers


def flops_per_token(config: ModelConfig, seq_len: int, *, count_embedding: bool = True) -> float:
    """Model FLOPs per token for forward and backward, as MFU counts them: 6 N + 12 L d S.

    N is the parameters that a token uses, d the width of attention (heads times head_dim), S the
    sequence length; the causal mask is not taken off. Source: PaLM (arXiv 2204.02311), appendix B.
    llm-foundry counts all of N, torchtitan leaves out the token embedding
    (``count_embedding=False``) unless the head uses it too.
    """
    n = active_parameters(config)
    if not count_embedding and not config.tie_word_embeddings:
        n -= config.vocab_size * config.hidden_size
    return 6.0 * n + 12.0 * config.num_hidden_layers * config.q_size * seq_len


def block_templates(config: ModelConfig) -> tuple[Template, ...]:
    """The modules of one block in forward order."""
    if config.fused_qkv:
        return tuple(_gpt2_block(config) if config.model_type == "gpt2" else _mpt_block(config))
    return tuple(_llama_block(config))


def _embeddings(config: ModelConfig, dtype: str) -> Iterator[Module]:
    rows = (config.vocab_size, config.max_position_embeddings)
    for path, n in zip(embedding_paths(config), rows, strict=False):
        shapes = (("weight", (n, config.hidden_size)),)
        yield _module(Template(path=path, kind="embedding", shapes=shapes), "", dtype)


def _head(config: ModelConfig) -> Template:
    shapes = (("weight", (config.vocab_size, config.hidden_size)),)
    return Template(path=HEAD, kind="linear", shapes=() if config.tie_word_embeddings else shapes)


def _blocks(config: ModelConfig, dtype: str) -> Iterator[Module]:
    templates = block_templates(config)
    for i in range(config.num_hidden_layers):
        block = f"{block_path(config)}.{i}"
        yield Module(name=block, kind="block")
        yield from (_module(t, f"{block}.", dtype) for t in templates)


def _module(template: Template, prefix: str, dtype: str) -> Module:
    name = prefix + template.path
    return Module(
        name=name,
        kind=template.kind,
        sublayer=template.sublayer,
        params=tuple(
            Param(name=f"{name}.{key}", shape=shape, dtype=dtype) for key, shape in template.shapes
        ),
    )


def _llama_block(config: ModelConfig) -> Iterator[Template]:
    d, q, kv, bias = config.hidden_size, config.q_size, config.kv_size, config.attention_bias
    yield Template(
        path="input_layernorm", kind="norm", sublayer="attention", shapes=_norm(config, d)
    )
    yield Template(path="self_attn", kind="attention", sublayer="attention")
    yield _linear("self_attn.q_proj", "attention", q, d, bias)
    yield _linear("self_attn.k_proj", "attention", kv, d, bias)
    yield _linear("self_attn.v_proj", "attention", kv, d, bias)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            shapes = _norm(config, config.head_dim)
            yield Template(
                path=f"self_attn.{name}", kind="norm", sublayer="attention", shapes=shapes
            )
    yield _linear("self_attn.o_proj", "attention", d, q, config.output_bias)
    yield Template(
        path="post_attention_layernorm", kind="norm", sublayer="mlp", shapes=_norm(config, d)
    )
    yield from _experts(config) if config.is_moe else _gated_mlp(config)


def _gated_mlp(config: ModelConfig) -> Iterator[Template]:
    d, ff = config.hidden_size, config.intermediate_size
    yield Template(path="mlp", kind="mlp", sublayer="mlp")
    yield _linear("mlp.gate_proj", "mlp", ff, d, config.mlp_bias)
    yield _linear("mlp.up_proj", "mlp", ff, d, config.mlp_bias)
    yield _linear("mlp.down_proj", "mlp", d, ff, config.mlp_bias)


def _experts(config: ModelConfig) -> Iterator[Template]:
    d, ff, n = config.hidden_size, config.intermediate_size, config.num_local_experts
    path, names = expert_names(config)
    yield Template(path=path, kind="mlp", sublayer="mlp")
    yield _linear(f"{path}.gate", "mlp", n, d, False)
    each = tuple(zip(names, ((ff, d), (ff, d), (d, ff)), strict=True))
    shapes = tuple((f"{i}.{name}.weight", shape) for i in range(n) for name, shape in each)
    yield Template(path=f"{path}.experts", kind="experts", sublayer="mlp", shapes=shapes)


def expert_names(config: ModelConfig) -> tuple[str, tuple[str, str, str]]:
    """The mixture's path in a block, and what its experts call their gate, up and down."""
    if config.model_type == "mixtral":
        return "block_sparse_moe", ("w1", "w3", "w2")
    return "mlp", ("gate_proj", "up_proj", "down_proj")


def _gpt2_block(config: ModelConfig) -> Iterator[Template]:
    d, ff, q = config.hidden_size, config.intermediate_size, config.q_size
    qkv = q + 2 * config.kv_size
    yield Template(path="ln_1", kind="norm", sublayer="attention", shapes=_norm(config, d))
    yield Template(path="attn", kind="attention", sublayer="attention")
    yield _conv1d("attn.c_attn", "attention", d, qkv)
    yield _conv1d("attn.c_proj", "attention", q, d)
    yield Template(path="ln_2", kind="norm", sublayer="mlp", shapes=_norm(config, d))
    yield Template(path="mlp", kind="mlp", sublayer="mlp")
    yield _conv1d("mlp.c_fc", "mlp", d, ff)
    yield _conv1d("mlp.c_proj", "mlp", ff, d)


def _mpt_block(config: ModelConfig) -> Iterator[Template]:
    d, ff, q = config.hidden_size, config.intermediate_size, config.q_size
    yield Template(path="norm_1", kind="norm", sublayer="attention", shapes=_norm(config, d))
    yield Template(path="attn", kind="attention", sublayer="attention")
    yield _linear("attn.Wqkv", "attention", q + 2 * config.kv_size, d, config.attention_bias)
    yield _linear("attn.out_proj", "attention", d, q, config.output_bias)
    yield Template(path="norm_2", kind="norm", sublayer="mlp", shapes=_norm(config, d))
    yield Template(path="ffn", kind="mlp", sublayer="mlp")
    yield _linear("ffn.up_proj", "mlp", ff, d, config.mlp_bias)
    yield _linear("ffn.down_proj", "mlp", d, ff, config.mlp_bias)


def _linear(path: str, sublayer: str, out: int, into: int, bias: bool) -> Template:
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (out, into)),)
    if bias:
        shapes += (("bias", (out,)),)
    return Template(path=path, kind="linear", sublayer=sublayer, shapes=shapes)


def _conv1d(path: str, sublayer: str, into: int, out: int) -> Template:
    shapes = (("weight", (into, out)), ("bias", (out,)))
    return Template(path=path, kind="linear", sublayer=sublayer, shapes=shapes)


def _norm(config: ModelConfig, width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    weight = (("weight", (width,)),)
    return (*weight, ("bias", (width,))) if config.norm_bias else weight


def _numel(template: Template) -> int:
    return sum(Param(name=key, shape=shape).numel for key, shape in template.shapes)


def _biases(config: ModelConfig) -> int:
    return sum(
        shape[0]
        for t in block_templates(config)
        if t.kind == "linear"
        for key, shape in t.shapes
        if key == "bias"
    )


def _active_share(config: ModelConfig, template: Template) -> float:
    if template.kind != "experts":
        return 1.0
    return config.num_experts_per_tok / config.num_local_experts
