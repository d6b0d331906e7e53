"""The ops of decoder-only transformers: kernels, what autograd saves, and what backward runs.

Kernel lists are those of eager PyTorch; with ``tape.compiled`` each composite is one kernel. Every
function appends to the tape and returns the name of the output. FLOPs count multiply and add apart.
"""

from __future__ import annotations

from fsdpsim.kernels.tape import GRAD, Step, Tape
from fsdpsim.workload import Attention

FP32 = 4
INT64 = 8

#: FLOPs of flash attention's backward over forward: 5 matmuls, one of them the scores again,
#: against 2. Source: FlashAttention-2 (arXiv 2307.08691), section 4.1.
ATTENTION_BACKWARD = 2.5


def d(name: str) -> str:
    """The gradient of a buffer."""
    return GRAD + name


def linear(
    tape: Tape,
    path: str,
    x: str,
    *,
    n_in: int,
    n_out: int,
    bias: bool = False,
    rows: int = 1,
    weights: tuple[str, ...] = (),
    copies: int = 1,
    policy: str = "mm",
    owner: str = "",
) -> str:
    """``y = x W + b`` over ``rows`` rows per token; ``copies`` weights share the rows (experts).

    Backward runs a matmul for the gradient of x and one for that of W, each as large as forward.
    """
    tape.owner = owner or path
    y = tape.buffer(path, rows * n_out)
    m = rows * tape.tokens
    flops = 2.0 * m * n_in * n_out
    weight = float(copies * n_in * n_out * tape.element)
    names = weights or (f"{path}.weight",)
    wgrad = Step(
        name=f"{path}.wgrad",
        kind="gemm",
        reads=(d(y), x),
        extra=weight,
        flops=flops,
        gemm=(n_out, n_in, m),
        gradients=names,
    )
    dgrad = Step(
        name=f"{path}.dgrad",
        kind="gemm",
        reads=(d(y),),
        writes=(d(x),),
        extra=weight,
        flops=flops,
        gemm=(m, n_in, n_out),
    )
    b_grad = Step(
        name=f"{path}.bias_grad",
        kind="reduction",
        reads=(d(y),),
        extra=n_out * tape.element,
        gradients=(f"{path}.bias",),
    )
    tape.add(
        Step(
            name=path,
            kind="gemm",
            reads=(x,),
            writes=(y,),
            extra=weight,
            flops=flops,
            gemm=(m, n_out, n_in),
        ),
        backward=(dgrad, wgrad, b_grad) if bias else (wgrad, dgrad),
        saves=(x,),
        policy=policy,
    )
    return y


def layer_norm(
    tape: Tape, path: str, x: str, width: int, *, statistics: int = 2, bias: bool = True
) -> str:
    """A fused norm: one kernel forward, two backward (input; weight and bias).

    Saves its input and ``statistics`` fp32 numbers per token: mean and rstd, RMSNorm only rstd.
    """
    tape.owner = path
    y = tape.buffer(path, width)
    saved = tape.buffer(f"{path}.statistics", statistics, FP32)
    inputs = (d(y), x, saved)
    parameters = (f"{path}.weight", f"{path}.bias") if bias else (f"{path}.weight",)
    tape.add(
        Step(name=path, kind="reduction", reads=(x,), writes=(y, saved)),
        backward=(
            Step(name=f"{path}.input_grad", kind="reduction", reads=inputs, writes=(d(x),)),
            Step(name=f"{path}.weight_grad", kind="reduction", reads=inputs, gradients=parameters),
        ),
        saves=(x, saved),
    )
    return y


def rms_norm(tape: Tape, path: str, x: str, width: int, heads: int = 1) -> str:
    """RMSNorm over ``heads`` rows of ``width // heads`` elements per token."""
    if tape.compiled or tape.fused_norm:
        return layer_norm(tape, path, x, width, statistics=heads, bias=False)
    return _composed_rms_norm(tape, path, x, width, heads)


def _composed_rms_norm(tape: Tape, path: str, x: str, width: int, heads: int) -> str:
    """RMSNorm as separate torch operations around an fp32 copy, as ``LlamaRMSNorm`` writes it.

    Autograd saves the fp32 copy, one factor per row, and the normalised rows before the weight.
    """
    tape.owner = path
    x32 = cast(tape, f"{path}.float", x, width, FP32)
    rstd = _rstd(tape, path, x32, width, heads)
    product = tape.buffer(f"{path}.product", width, FP32)
    rows = tape.buffer(f"{path}.drstd_rows", width, FP32)
    tape.add(
        Step(name=product, reads=(x32, rstd), writes=(product,)),
        backward=(
            Step(name=f"{path}.product_grad", reads=(d(product), rstd), writes=(d(x32),)),
            Step(name=f"{path}.rstd_rows", reads=(d(product), x32), writes=(rows,)),
            Step(name=f"{path}.rstd_sum", kind="reduction", reads=(rows,), writes=(d(rstd),)),
        ),
        saves=(x32, rstd),
    )
    normed = cast(tape, f"{path}.normed", product, width, tape.element)
    return _times_weight(tape, path, normed, width)


def _rstd(tape: Tape, path: str, x32: str, width: int, heads: int) -> str:
    """``rsqrt(x.pow(2).mean(-1) + eps)`` and its derivatives (torch ``derivatives.yaml``)."""
    square = tape.buffer(f"{path}.square", width, FP32)
    rstd = tape.buffer(f"{path}.rstd", heads, FP32)
    slope = tape.buffer(f"{path}.dmean", heads, FP32)
    dsquare = tape.buffer(f"{path}.dsquare", width, FP32)
    twice = tape.buffer(f"{path}.twice", width, FP32)
    tape.add(
        Step(name=f"{path}.pow", reads=(x32,), writes=(square,)),
        Step(name=f"{path}.mean", kind="reduction", reads=(square,), writes=(rstd,)),
        Step(name=f"{path}.add_eps", reads=(rstd,), writes=(rstd,)),
        Step(name=f"{path}.rsqrt", reads=(rstd,), writes=(rstd,)),
        backward=(
            Step(name=f"{path}.rsqrt_grad.pow", reads=(rstd,), writes=(slope,)),
            Step(name=f"{path}.rsqrt_grad.scale", reads=(slope,), writes=(slope,)),
            Step(name=f"{path}.rsqrt_grad.mul", reads=(slope, d(rstd)), writes=(slope,)),
            Step(name=f"{path}.mean_grad", reads=(slope,), writes=(dsquare,)),
            Step(name=f"{path}.pow_grad.pow", reads=(x32,), writes=(twice,)),
            Step(name=f"{path}.pow_grad.scale", reads=(twice,), writes=(twice,)),
            Step(name=f"{path}.pow_grad.mul", reads=(dsquare, twice), writes=(d(x32),)),
        ),
        saves=(x32, rstd),
    )
    return rstd


def _times_weight(tape: Tape, path: str, x: str, width: int) -> str:
    y = tape.buffer(path, width)
    rows = tape.buffer(f"{path}.dweight_rows", width)
    weight = (f"{path}.weight",)
    tape.add(
        Step(name=f"{path}.mul_weight", reads=(x,), writes=(y,)),
        backward=(
            Step(name=f"{path}.mul_weight_grad", reads=(d(y),), writes=(d(x),)),
            Step(name=f"{path}.weight_rows", reads=(d(y), x), writes=(rows,)),
            Step(name=f"{path}.weight_sum", kind="reduction", reads=(rows,), gradients=weight),
        ),
        saves=(x,),
    )
    return y


def cast(tape: Tape, name: str, x: str, width: int, element: int) -> str:
    """``x.to(dtype)`` to ``element`` bytes per element; nothing when x has them already."""
    y = tape.buffer(name, width, element)
    if tape.nbytes(x) == tape.nbytes(y):
        return x
    tape.add(
        Step(name=name, reads=(x,), writes=(y,)),
        backward=(Step(name=f"{name}.grad", reads=(d(y),), writes=(d(x),)),),
    )
    return y


def rope(tape: Tape, path: str, x: str, width: int) -> str:
    """Rotary positions: cast to fp32, complex product, cast back; the same again backward.

    Saves nothing that grows with the batch. Source: ``apply_rotary_emb`` of Meta's Llama.
    """
    tape.owner = path
    wide = tape.element if tape.compiled else FP32
    name = f"{x}.rope"
    x = cast(tape, f"{name}.float", x, width, wide)
    turned = tape.buffer(f"{name}.turned", width, wide)
    tape.add(
        Step(name=name, reads=(x,), writes=(turned,)),
        backward=(Step(name=f"{name}.grad", reads=(d(turned),), writes=(d(x),)),),
    )
    return cast(tape, name, turned, width, tape.element)


def repeat_kv(tape: Tape, path: str, x: str, width: int) -> str:
    """Copy each key or value head to all query heads of its group, ``width`` elements in all."""
    tape.owner = path
    y = tape.buffer(f"{x}.repeat", width)
    gradient = Step(name=f"{y}.grad", kind="reduction", reads=(d(y),), writes=(d(x),))
    tape.add(Step(name=y, reads=(x,), writes=(y,)), backward=(gradient,))
    return y


def attention(
    tape: Tape,
    path: str,
    qkv: tuple[str, ...],
    *,
    seq_len: int,
    heads: int,
    head_dim: int,
    kv_heads: int,
    implementation: str,
) -> str:
    """Causal flash attention over (q, k, v), or over one fused qkv buffer.

    Forward FLOPs are 4 S d per token over the full square, half of it under the causal mask. Saves
    its inputs, the output, and one fp32 log-sum-exp per token and head. Source: FlashAttention-2
    (arXiv 2307.08691); buffers of its backward as in ``flash_api.cpp`` ``mha_bwd``.
    """
    tape.owner = path
    width = heads * head_dim
    y = tape.buffer(f"{path}.attention", width)
    lse = tape.buffer(f"{path}.lse", heads, FP32)
    flops = 4.0 * seq_len * width * tape.tokens / 2
    shape = Attention(implementation=implementation, seq_len=seq_len, head_dim=head_dim)
    tape.add(
        Step(
            name=f"{path}.flash_fwd",
            kind="attention",
            reads=qkv,
            writes=(y, lse),
            flops=flops,
            attention=shape,
        ),
        backward=_attention_backward(
            tape,
            path,
            qkv,
            (heads, head_dim, kv_heads),
            flops=ATTENTION_BACKWARD * flops,
            kernel=shape,
        ),
        saves=(*qkv, y, lse),
        policy="attention",
    )
    return y


def _attention_backward(
    tape: Tape,
    path: str,
    qkv: tuple[str, ...],
    shape: tuple[int, int, int],
    flops: float,
    kernel: Attention,
) -> tuple[Step, ...]:
    """Row sums of dO * O, the main kernel into an fp32 dq, its cast; sums over grouped heads."""
    heads, head_dim, kv_heads = shape
    width = heads * head_dim
    y, lse = f"{path}.attention", f"{path}.lse"
    delta = tape.buffer(f"{path}.delta", heads, FP32)
    accumulator = tape.buffer(f"{path}.dq_accumulator", width, FP32)
    grouped = kv_heads < heads
    split = len(qkv) == 1
    names = [tape.buffer(f"{path}.d{x}", n * head_dim) for x, n in _qkv_heads(heads, kv_heads)]
    dq, dk, dv = names if split else tuple(map(d, qkv))
    full = [tape.buffer(f"{path}.d{x}_expanded", width) for x in "kv"] if grouped else [dk, dv]
    steps = [
        Step(name=f"{path}.flash_bwd_dot_do_o", reads=(d(y), y), writes=(delta, accumulator)),
        Step(
            name=f"{path}.flash_bwd",
            kind="attention",
            reads=(d(y), *qkv, lse, delta, accumulator),
            writes=(accumulator, *full),
            flops=flops,
            attention=kernel,
        ),
        Step(name=f"{path}.flash_bwd_convert_dq", reads=(accumulator,), writes=(dq,)),
    ]
    if grouped:
        steps += [
            Step(name=f"{path}.sum_groups", kind="reduction", reads=(wide,), writes=(narrow,))
            for wide, narrow in zip(full, (dk, dv), strict=True)
        ]
    if split:
        steps.append(Step(name=f"{path}.cat_grads", reads=(dq, dk, dv), writes=(d(qkv[0]),)))
    return tuple(steps)


def _qkv_heads(heads: int, kv_heads: int) -> tuple[tuple[str, int], ...]:
    return ("q", heads), ("k", kv_heads), ("v", kv_heads)


def swiglu(tape: Tape, path: str, gate: str, up: str, width: int) -> str:
    """``silu(gate) * up``; eager saves the gate, its activation, and up."""
    y = tape.buffer(f"{path}.act", width)
    if tape.compiled:
        backward = Step(name=f"{path}.swiglu_grad", reads=(d(y), gate, up), writes=(d(gate), d(up)))
        forward = Step(name=f"{path}.swiglu", reads=(gate, up), writes=(y,))
        tape.add(forward, backward=(backward,), saves=(gate, up))
        return y
    silu = tape.buffer(f"{path}.silu", width)
    tape.add(
        Step(name=f"{path}.silu", reads=(gate,), writes=(silu,)),
        backward=(Step(name=f"{path}.silu_grad", reads=(d(silu), gate), writes=(d(gate),)),),
        saves=(gate,),
    )
    tape.add(
        Step(name=f"{path}.mul", reads=(silu, up), writes=(y,)),
        backward=(
            Step(name=f"{path}.mul_grad_up", reads=(d(y), silu), writes=(d(up),)),
            Step(name=f"{path}.mul_grad_silu", reads=(d(y), up), writes=(d(silu),)),
        ),
        saves=(silu, up),
    )
    return y


def gelu(tape: Tape, path: str, x: str, width: int) -> str:
    """GELU; saves its input."""
    tape.owner = path
    y = tape.buffer(f"{path}.act", width)
    tape.add(
        Step(name=f"{path}.gelu", reads=(x,), writes=(y,)),
        backward=(Step(name=f"{path}.gelu_grad", reads=(d(y), x), writes=(d(x),)),),
        saves=(x,),
    )
    return y


def add(tape: Tape, name: str, x: str, branch: str, width: int) -> str:
    """``x + branch``; one gradient serves both. It stays with the module that made the branch."""
    y = tape.buffer(name, width)
    tape.add(Step(name=f"{name}.add", reads=(x, branch), writes=(y,)), passes=((x, y), (branch, y)))
    return y


def embedding(tape: Tape, path: str, width: int, *, rows: int, lookups: int) -> str:
    """Copies of ``lookups`` of a table's ``rows``; backward fills the gradient from zero."""
    tape.owner = path
    y = path
    tape.sizes[y] = lookups * width * tape.element
    indices = lookups * INT64
    table = float(rows * width * tape.element)
    tape.add(
        Step(name=path, kind="embedding", writes=(y,), extra=indices + tape.sizes[y]),
        backward=(
            Step(name=f"{path}.zero_grad", extra=table, gradients=(f"{path}.weight",)),
            Step(name=f"{path}.sort", kind="embedding", extra=8.0 * indices),
            Step(
                name=f"{path}.grad",
                kind="embedding",
                reads=(d(y),),
                extra=indices + 2.0 * tape.sizes[y],
            ),
        ),
    )
    return y


def add_positions(tape: Tape, name: str, x: str, positions: str, width: int) -> str:
    """Add the position rows to every sequence; their gradient is the sum over sequences."""
    y = tape.buffer(name, width)
    one_sequence = tape.nbytes(positions) == tape.nbytes(x)
    summed = Step(name=f"{name}.sum", kind="reduction", reads=(d(y),), writes=(d(positions),))
    tape.add(
        Step(name=f"{name}.add", reads=(x, positions), writes=(y,)),
        backward=() if one_sequence else (summed,),
        passes=((x, y), (positions, y)) if one_sequence else ((x, y),),
    )
    return y
