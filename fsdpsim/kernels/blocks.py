"""What the blocks, embeddings and heads of each family compute, as ops on a tape."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpsim.kernels import moe, ops
from fsdpsim.kernels.loss import cross_entropy, logged_cross_entropies
from fsdpsim.kernels.tape import Tape
from fsdpsim.model.config import ModelConfig
from fsdpsim.model.modules import HEAD, embedding_paths, final_norm_path

X = "x"
"""The input of a block or head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's micro-batch, and how the model is computed."""

    size: int
    seq_len: int
    dtype: str = "bfloat16"
    compiled: bool = False
    fused_norm: bool = True
    repeat_kv: bool = False
    attention: str = "flash2"

    @property
    def tokens(self) -> int:
        """Sequences times sequence length."""
        return self.size * self.seq_len

    def tape(self) -> Tape:
        """A tape on which nothing is recorded yet."""
        return Tape(
            tokens=self.tokens,
            dtype=self.dtype,
            compiled=self.compiled,
            fused_norm=self.fused_norm,
        )


def embedding(config: ModelConfig, batch: Batch) -> tuple[Tape, str]:
    """The lookup of tokens and, when learned, positions; returns the tape and the output's name."""
    tape, width = batch.tape(), config.hidden_size
    paths = embedding_paths(config)
    y = ops.embedding(tape, paths[0], width, rows=config.vocab_size, lookups=batch.tokens)
    if len(paths) == 1:
        return tape, y
    rows = config.max_position_embeddings
    positions = ops.embedding(tape, paths[1], width, rows=rows, lookups=batch.seq_len)
    return tape, ops.add_positions(tape, "embedding", y, positions, width)


def block(config: ModelConfig, batch: Batch) -> tuple[Tape, str]:
    """One transformer block: attention and MLP, each normed before and added after.

    [Note: Saved activations] Elements per token that eager autograd keeps of one block with fused
    norms, its output included and its input not (that is the output of the block before):
    Llama 4 d + 2 q + 2 kv + 4 ff, GPT 4 d + 2 q + 2 kv + 2 ff, where d is hidden_size, q and kv
    are the widths of queries and of keys, ff that of the MLP; and per token in fp32 one log-sum-exp
    per head and the norms' statistics. For GPT with ff = 4 d in 16 bits that is the 32 s b h of
    Korthikanti et al. (arXiv 2205.05198) without dropout and without the attention matrix.
    """
    tape = batch.tape()
    tape.buffer(X, config.hidden_size)
    if config.fused_qkv:
        return tape, _gpt_block(tape, config, batch)
    return tape, _llama_block(tape, config, batch)


def tail(
    config: ModelConfig,
    batch: Batch,
    *,
    chunks: int,
    compiled: bool,
    keep_logits: bool = False,
    logged: int = 0,
) -> Tape:
    """Final norm, head and cross-entropy; the norm is compiled with the loss or not at all."""
    tape = batch.tape()
    tape.compiled = compiled
    width = config.hidden_size
    tape.buffer(X, width)
    normed = _norm(tape, config, final_norm_path(config), X)
    weights = (f"{embedding_paths(config)[0]}.weight",) if config.tie_word_embeddings else ()
    logits = ops.linear(
        tape, HEAD, normed, n_in=width, n_out=config.vocab_size, weights=weights, policy=""
    )
    cross_entropy(tape, logits, chunks, keep=keep_logits)
    logged_cross_entropies(tape, logits, logged)
    return tape


def _norm(tape: Tape, config: ModelConfig, path: str, x: str) -> str:
    if config.fused_qkv:
        return ops.layer_norm(tape, path, x, config.hidden_size)
    return ops.rms_norm(tape, path, x, config.hidden_size)


def _llama_block(tape: Tape, config: ModelConfig, batch: Batch) -> str:
    width, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
    bias = config.attention_bias
    normed = ops.rms_norm(tape, "input_layernorm", X, width)
    q = ops.linear(tape, "self_attn.q_proj", normed, n_in=width, n_out=q_size, bias=bias)
    k = ops.linear(tape, "self_attn.k_proj", normed, n_in=width, n_out=kv_size, bias=bias)
    v = ops.linear(tape, "self_attn.v_proj", normed, n_in=width, n_out=kv_size, bias=bias)
    if config.qk_norm:
        q = ops.rms_norm(tape, "self_attn.q_norm", q, q_size, config.num_attention_heads)
        k = ops.rms_norm(tape, "self_attn.k_norm", k, kv_size, config.num_key_value_heads)
    q = ops.rope(tape, "self_attn", q, q_size)
    k = ops.rope(tape, "self_attn", k, kv_size)
    kv_heads = config.num_key_value_heads
    if batch.repeat_kv and kv_heads < config.num_attention_heads:
        k, v = (ops.repeat_kv(tape, "self_attn", x, q_size) for x in (k, v))
        kv_heads = config.num_attention_heads
    context = _attention(tape, config, batch, "self_attn", (q, k, v), kv_heads)
    out = ops.linear(
        tape, "self_attn.o_proj", context, n_in=q_size, n_out=width, bias=config.output_bias
    )
    h = ops.add(tape, "hidden", X, out, width)
    normed = ops.rms_norm(tape, "post_attention_layernorm", h, width)
    mlp = moe.experts if config.is_moe else _gated_mlp
    return ops.add(tape, "output", h, mlp(tape, config, normed), width)


def _attention(
    tape: Tape,
    config: ModelConfig,
    batch: Batch,
    path: str,
    qkv: tuple[str, ...],
    kv_heads: int,
) -> str:
    return ops.attention(
        tape,
        path,
        qkv,
        seq_len=batch.seq_len,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        kv_heads=kv_heads,
        implementation=batch.attention,
    )


def _gated_mlp(tape: Tape, config: ModelConfig, x: str) -> str:
    width, ff, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    gate = ops.linear(tape, "mlp.gate_proj", x, n_in=width, n_out=ff, bias=bias)
    up = ops.linear(tape, "mlp.up_proj", x, n_in=width, n_out=ff, bias=bias)
    act = ops.swiglu(tape, "mlp", gate, up, ff)
    return ops.linear(tape, "mlp.down_proj", act, n_in=ff, n_out=width, bias=bias)


def _gpt_block(tape: Tape, config: ModelConfig, batch: Batch) -> str:
    names = _GPT2_NAMES if config.model_type == "gpt2" else _MPT_NAMES
    norm_1, attn, qkv_path, out_path, norm_2, mlp, up_path, down_path = names
    width, ff, q_size = config.hidden_size, config.intermediate_size, config.q_size
    bias, mlp_bias = config.attention_bias, config.mlp_bias
    qkv_size = q_size + 2 * config.kv_size
    normed = ops.layer_norm(tape, norm_1, X, width, bias=config.norm_bias)
    qkv = ops.linear(tape, qkv_path, normed, n_in=width, n_out=qkv_size, bias=bias)
    context = _attention(tape, config, batch, attn, (qkv,), config.num_key_value_heads)
    out = ops.linear(tape, out_path, context, n_in=q_size, n_out=width, bias=bias)
    h = ops.add(tape, "hidden", X, out, width)
    normed = ops.layer_norm(tape, norm_2, h, width, bias=config.norm_bias)
    up = ops.linear(tape, up_path, normed, n_in=width, n_out=ff, bias=mlp_bias)
    act = ops.gelu(tape, mlp, up, ff)
    down = ops.linear(tape, down_path, act, n_in=ff, n_out=width, bias=mlp_bias)
    return ops.add(tape, "output", h, down, width)


_GPT2_NAMES = (
    "ln_1",
    "attn",
    "attn.c_attn",
    "attn.c_proj",
    "ln_2",
    "mlp",
    "mlp.c_fc",
    "mlp.c_proj",
)
_MPT_NAMES = (
    "norm_1",
    "attn",
    "attn.Wqkv",
    "attn.out_proj",
    "norm_2",
    "ffn",
    "ffn.up_proj",
    "ffn.down_proj",
)
