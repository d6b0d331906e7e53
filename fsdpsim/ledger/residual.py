"""ZeRO-R: activations, buffers and the working memory of single operators, by formula.

Sources: ZeRO, arXiv 1910.02054, section 3.2 (residual states; the footnote gives the activations of
a GPT-2-like model), sections 6.1 to 6.3 and 8 (partitioned checkpoints and their communication);
ZeRO-Infinity, arXiv 2104.07857, section 3, equations 3 to 5.

One figure does not follow: ZeRO, section 6.1, says that checkpoints of its 100B model take 33 GB
per GPU and 2 GB partitioned over 16 ranks. The formula gives 67.1 and 4.2 GB for its own batch of
32; the paper shows no derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

#: All-reduces of Megatron-LM's tensor parallelism per block: two in each of forward, recompute and
#: backward, each of them moving twice its size (ZeRO, section 8).
MEGATRON_VOLUME = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that the formulas ask for: counts of sequences, tokens, elements and blocks."""

    batch: int
    seq_len: int
    hidden: int
    layers: int
    heads: int = 1

    @property
    def checkpoint_elements(self) -> int:
        """Elements of one block's input."""
        return self.batch * self.seq_len * self.hidden


def activation_elements(shape: Shape) -> int:
    """Activations of a GPT-2-like model, none recomputed: 12 hd batch seq layers (ZeRO, 3.2)."""
    return 12 * shape.checkpoint_elements * shape.layers


def checkpoint_bytes(shape: Shape, *, interval: int = 1, dtype_bytes: int = 2) -> float:
    """One checkpoint per ``interval`` blocks: 2 bsz seq hd nl / ci (ZeRO-Infinity, equation 3)."""
    return dtype_bytes * shape.checkpoint_elements * shape.layers / interval


def partitioned_checkpoint_bytes(shape: Shape, model_parallel: int, **kwargs: int) -> float:
    """P_a: each of ``model_parallel`` ranks, which would all hold the same, keeps its part."""
    return checkpoint_bytes(shape, **kwargs) / model_parallel


def partitioning_overhead() -> float:
    """P_a's one all-gather per block against Megatron's all-reduces: under a tenth (ZeRO, 8)."""
    return 1 / MEGATRON_VOLUME


def fused_buffer_bytes(parameters: int) -> int:
    """One fp32 buffer for all gradients, which C_B replaces by one of constant size (ZeRO, 3.2)."""
    return 4 * parameters


def working_memory_bytes(parameters: int, *, tiles: int = 1, dtype_bytes: int = 2) -> float:
    """Parameters and gradients of one operator, run in ``tiles`` pieces one after the other.

    ZeRO-Infinity, equation 4, for the largest linear layer (hd to 4 hd): 4 hd 4hd; section 5.1.3
    for memory-centric tiling. Each piece must lie in memory contiguously.
    """
    return 2 * dtype_bytes * parameters / tiles


def activation_working_memory_bytes(shape: Shape, *, interval: int = 1) -> int:
    """Activations between two checkpoints, which backward recomputes (ZeRO-Infinity, equation 5).

    bsz seq ci (16 hd + 2 heads seq) bytes: attention scores are kept, as before FlashAttention.
    """
    per_token = 16 * shape.hidden + 2 * shape.heads * shape.seq_len
    return shape.batch * shape.seq_len * interval * per_token
