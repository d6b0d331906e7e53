"""Names that torch's profiler shows for FSDP's hooks: real and simulated traces line up.

Source: the ``record_function`` calls in ``torch/distributed/fsdp`` of torch 2.13. FSDP2 puts the
unit's name into the label (none for the root module, whose name is empty); FSDP1 does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_FSDP1 = "FullyShardedDataParallel."


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What one runtime calls its hooks; what is missing has no label."""

    hooks: Mapping[str, str] = field(default_factory=dict)
    """Mark at the start of a hook -> label."""
    prefetch: Mapping[str, str] = field(default_factory=dict)
    """Hook -> label of the prefetch in it."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Labels inside ``post_backward`` after its first: ``reshard``, ``rs_wait``, ``reduce``."""
    final_callback: str | None = None
    root_pre_forward: str | None = None
    all_gather: str | None = None
    copy_out: str | None = None
    rate_limiter: str | None = None
    forward: str = "forward"
    """The forward of the whole model."""
    with_name: bool = False
    """Whether labels carry the unit's name."""
    units_only: bool = False
    """Whether modules without parameters of their own have no hooks' labels."""

    def of_unit(self, label: str, name: str) -> str:
        """``label`` with the unit's name, where the runtime writes it."""
        if "{name}" in label:
            return label.replace("{name}", name)
        return f"{label} ({name})" if self.with_name and name else label


FSDP1 = Labels(
    hooks={
        "pre_forward": _FSDP1 + "_pre_forward",
        "post_forward": _FSDP1 + "_post_forward",
        "pre_backward": _FSDP1 + "_pre_backward_hook",
        "post_backward": _FSDP1 + "_post_backward_hook",
        "post_backward_reshard_only": _FSDP1 + "_post_backward_hook_reshard_only",
    },
    prefetch={
        "pre_forward": _FSDP1 + "_pre_forward_prefetch",
        "pre_backward": _FSDP1 + "_pre_backward_prefetch",
        "post_backward": _FSDP1 + "_post_backward_prefetch",
        "post_backward_reshard_only": _FSDP1 + "_post_backward_prefetch",
    },
    root_pre_forward=_FSDP1 + "_root_pre_forward",
    rate_limiter=_FSDP1 + "rate_limiter",
)

FSDP2 = Labels(
    hooks={
        "pre_forward": "FSDP::pre_forward",
        "post_forward": "FSDP::post_forward",
        "pre_backward": "FSDP::pre_backward",
        "post_backward": "FSDP::post_backward_accumulate",
    },
    prefetch={
        "pre_forward": "FSDP::forward_prefetch for {name}",
        "pre_backward": "FSDP::backward_prefetch for {name}",
    },
    stages={
        "reshard": "FSDP::post_backward_reshard",
        "rs_wait": "FSDP::post_backward_rs_wait",
        "reduce": "FSDP::post_backward_reduce",
    },
    final_callback="FSDP::root_post_backward_callback",
    root_pre_forward="FSDP::root_pre_forward",
    all_gather="FSDP::all_gather",
    copy_out="FSDP::all_gather_copy_out",
    with_name=True,
    units_only=True,
)

LABELS = {
    "fsdp1": FSDP1,
    "fsdp2": FSDP2,
    "ddp": Labels(forward="DistributedDataParallel.forward"),
    "textbook": Labels(),
    "zero1": Labels(),
    "zero2": Labels(),
    "zero_offload": Labels(),
}

#: torch's classes of the scenario's optimizers, as ``Optimizer.step#AdamW.step`` names them.
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
