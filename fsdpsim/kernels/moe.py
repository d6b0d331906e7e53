"""The MLP of a mixture: a router, the chosen experts' rows put together, grouped matmuls.

Every expert is taken to get the same number of rows, and the matmuls of one layer's experts run as
one grouped kernel (``torch._grouped_mm``). Selective checkpointing looks only at ``aten.mm`` and
attention, and torchtitan excludes the router, so that the whole mixture is recomputed.
"""

from __future__ import annotations

from fsdpsim.kernels import ops
from fsdpsim.kernels.ops import FP32, INT64, d
from fsdpsim.kernels.tape import Step, Tape
from fsdpsim.model.config import ModelConfig
from fsdpsim.model.modules import expert_names

GATE, UP, DOWN = range(3)


def experts(tape: Tape, config: ModelConfig, x: str) -> str:
    """Router, permutation, SwiGLU experts, weighted sum; returns the name of the output."""
    path, projections = expert_names(config)
    width, ff, n = config.hidden_size, config.intermediate_size, config.num_local_experts
    chosen = config.num_experts_per_tok
    scores = _route(tape, path, x, width, n, chosen)
    rows = _permute(tape, f"{path}.experts", x, scores, width, chosen)

    def project(which: int, x: str, n_in: int, n_out: int) -> str:
        name = projections[which]
        return ops.linear(
            tape,
            f"{path}.experts.{name}",
            x,
            n_in=n_in,
            n_out=n_out,
            rows=chosen,
            weights=tuple(f"{path}.experts.{i}.{name}.weight" for i in range(n)),
            copies=n,
            policy="",
            owner=f"{path}.experts",
        )

    gate, up = (project(which, rows, width, ff) for which in (GATE, UP))
    act = ops.swiglu(tape, f"{path}.experts", gate, up, chosen * ff)
    down = project(DOWN, act, ff, width)
    return _combine(tape, f"{path}.experts", down, scores, width, chosen)


def _route(tape: Tape, path: str, x: str, width: int, n: int, chosen: int) -> str:
    """Softmax in fp32 over the experts and the largest ``chosen`` of it, renormalised."""
    logits = ops.linear(tape, f"{path}.gate", x, n_in=width, n_out=n, policy="")
    tape.owner = path
    wide = ops.cast(tape, f"{path}.router.float", logits, n, FP32)
    softmax = tape.buffer(f"{path}.router.softmax", n, FP32)
    tape.add(
        Step(name=softmax, kind="reduction", reads=(wide,), writes=(softmax,)),
        backward=(
            Step(
                name=f"{softmax}.grad",
                kind="reduction",
                reads=(d(softmax), softmax),
                writes=(d(wide),),
            ),
        ),
        saves=(softmax,),
    )
    scores = tape.buffer(f"{path}.router.scores", chosen, FP32)
    indices = tape.buffer(f"{path}.router.indices", chosen, INT64)
    tape.add(
        Step(
            name=f"{path}.router.topk", kind="embedding", reads=(softmax,), writes=(scores, indices)
        ),
        Step(name=f"{path}.router.normalize", kind="reduction", reads=(scores,), writes=(scores,)),
        backward=(Step(name=f"{scores}.grad", reads=(d(scores), indices), writes=(d(softmax),)),),
        saves=(scores, indices),
    )
    return scores


def _permute(tape: Tape, path: str, x: str, scores: str, width: int, chosen: int) -> str:
    """Sort the choices by expert and gather their rows; backward adds the rows up again."""
    tape.owner = path
    order = tape.buffer(f"{path}.order", chosen, INT64)
    rows = tape.buffer(f"{path}.rows", chosen * width)
    repeated = float((chosen - 1) * tape.nbytes(x))
    tape.add(
        Step(name=f"{path}.sort", kind="embedding", reads=(scores,), writes=(order,)),
        Step(name=rows, kind="embedding", reads=(x, order), writes=(rows,), extra=repeated),
        backward=(
            Step(name=f"{rows}.grad", kind="embedding", reads=(d(rows), order), writes=(d(x),)),
        ),
        saves=(order,),
    )
    return rows


def _combine(tape: Tape, path: str, x: str, scores: str, width: int, chosen: int) -> str:
    """Weight each row by its score and add the rows of a token."""
    weighted = tape.buffer(f"{path}.weighted", chosen * width)
    products = tape.buffer(f"{path}.dscores_rows", chosen * width)
    tape.add(
        Step(name=weighted, reads=(x, scores), writes=(weighted,)),
        backward=(
            Step(name=f"{weighted}.grad", reads=(d(weighted), scores), writes=(d(x),)),
            Step(name=f"{path}.scores_rows", reads=(d(weighted), x), writes=(products,)),
            Step(
                name=f"{path}.scores_sum",
                kind="reduction",
                reads=(products,),
                writes=(d(scores),),
            ),
        ),
        saves=(x, scores),
    )
    y = tape.buffer(f"{path}.combined", width)
    order = f"{path}.order"
    tape.add(
        Step(name=y, kind="embedding", reads=(weighted, order), writes=(y,)),
        backward=(
            Step(name=f"{y}.grad", kind="embedding", reads=(d(y), order), writes=(d(weighted),)),
        ),
        saves=(order,),
    )
    return y
