"""Cross-entropy in fp32: with a large vocabulary, the memory peak of a step."""

from __future__ import annotations

from fsdpsim.kernels.ops import FP32, INT64, d
from fsdpsim.kernels.tape import Step, Tape

LOSS = "loss"
"""Owner of the loss's ops: no module of the model."""


def logged_cross_entropies(tape: Tape, logits: str, count: int) -> None:
    """``count`` more cross-entropies of the logits, without gradient, as a trainer logs them.

    Each is a cast to fp32, a log-softmax and a sum. They run when the activations are gone, so that
    their buffers never make the peak and are left out. Source: Composer's
    ``Trainer._eval_train_metrics``; llm-foundry's models log two, the loss and the perplexity.
    """
    tape.owner = LOSS
    numel = tape.nbytes(logits) / tape.element
    for number in range(count):
        cast = numel * (tape.element + FP32)
        name = f"logged_cross_entropy.{number}"
        tape.add(
            Step(name=f"{name}.float", keeps=(logits,), extra=cast),
            Step(name=name, kind="reduction", keeps=(logits,), extra=2.0 * FP32 * numel),
        )


def cross_entropy(tape: Tape, logits: str, chunks: int = 1, *, keep: bool = False) -> None:
    """``cross_entropy(logits.float(), labels)`` of all tokens.

    Eager: the fp32 logits are gone after the log-softmax, whose result is saved; backward makes two
    more fp32 buffers of that size before the gradient is cast back, so that the peak is 12 bytes
    per logit. With several ``chunks`` of the tokens, one after the other, only the saved
    log-softmax spans them all (torchtitan PR 996). On a compiled tape: one kernel each way over the
    low-precision logits, which are saved with one factor per token.

    ``keep``: the training loop still has the fp32 logits in a variable while it goes backward, 4
    bytes per logit more (torchtitan until PR 391).
    """
    tape.owner = LOSS
    if tape.compiled:
        _compiled(tape, logits)
        return
    for piece, nbytes in _pieces(tape, logits, chunks):
        _eager(tape, piece, nbytes, logits, keep=keep)


def _compiled(tape: Tape, logits: str) -> None:
    factor = tape.buffer("loss.log_sum_exp", 1, FP32)
    labels = tape.tokens * INT64
    tape.add(
        Step(name="loss", kind="reduction", reads=(logits,), writes=(factor,), extra=labels),
        backward=(Step(name="loss.grad", reads=(logits, factor), writes=(d(logits),)),),
        saves=(logits, factor),
    )


def _pieces(tape: Tape, logits: str, chunks: int) -> list[tuple[str, int]]:
    """Names and bytes of the pieces, which are views; backward puts their gradients together."""
    whole = tape.nbytes(logits)
    if chunks == 1:
        return [(logits, whole)]
    row = whole // tape.tokens
    counts = [(tape.tokens + i) // chunks for i in range(chunks)]
    pieces = [(f"{logits}.{i}", count * row) for i, count in enumerate(counts)]
    tape.sizes |= dict(pieces)
    gradients = tuple(d(name) for name, _ in pieces)
    tape.add(
        backward=(Step(name="loss.cat_grads", reads=gradients, writes=(d(logits),)),),
        views=tuple((logits, name) for name, _ in pieces),
    )
    return pieces


def _eager(tape: Tape, piece: str, nbytes: int, logits: str, *, keep: bool) -> None:
    """Cast, log-softmax, negative log-likelihood. The logits live until the loss is there."""
    wide, log_softmax, dlog = f"{piece}.float", f"{piece}.log_softmax", f"{piece}.dlog_softmax"
    tape.sizes |= dict.fromkeys((wide, log_softmax, dlog), nbytes * FP32 // tape.element)
    if tape.element == FP32:
        wide, first = piece, _read(log_softmax, piece, nbytes, logits, log_softmax)
    else:
        gradient = Step(name=f"{wide}.grad", reads=(d(wide),), writes=(d(piece),))
        tape.add(_read(wide, piece, nbytes, logits, wide), backward=(gradient,))
        first = Step(name=log_softmax, kind="reduction", reads=(wide,), writes=(log_softmax,))
    kept = (wide,) if keep else ()
    slope = Step(
        name=f"{log_softmax}.grad",
        kind="reduction",
        reads=(dlog, log_softmax),
        writes=(d(wide),),
        keeps=kept,
    )
    tape.add(
        first,
        Step(name=f"{piece}.nll", kind="reduction", keeps=(log_softmax, logits)),
        backward=(Step(name=f"{piece}.nll_grad", writes=(dlog,)), slope),
        saves=(log_softmax, *kept),
    )


def _read(name: str, piece: str, nbytes: int, logits: str, out: str) -> Step:
    """A kernel that reads the logits, or a piece of them."""
    if piece == logits:
        return Step(name=name, kind="reduction", reads=(logits,), writes=(out,))
    return Step(name=name, kind="reduction", keeps=(logits,), extra=nbytes, writes=(out,))
