"""What a configuration needs at least, in seconds and bytes, without simulating it.

A search may skip what cannot win by these, so they must never exceed what a simulation gives.

[Note: Time bound] The step is the time between the ends of two iterations' work. These runtimes end
an iteration by making the compute stream wait for all of its communication (FSDP's final callbacks,
DDP's ``finalize_backward``), and an iteration's first kernel or gather queues behind that. So all
kernels of the last iteration lie within the step, one after the other on the compute stream, and so
do the collectives of each communicator: the step is no shorter than either sum. Counted are kernels
of forward, recompute and backward, and for each unit an all-gather (the optimizer has changed its
parameters), a second one where forward frees it, and a reduce-scatter. Waits, launches, copies and
the optimizer only add to it. The lecture's runtime has no such order between an optimizer kernel
and the next gather: its collectives count for a single iteration only.

[Note: Memory bound] What is allocated depends on the host's order alone, not on time. Bytes that
are alive together in these runtimes: the sharded parameters, the optimizer's state from the first
step on, and

* in the forward of part i: what parts 1 to i keep for backward, and the unit of i, unsharded;
* in its backward: what parts 1 to i - 1 keep, the unit of i, unsharded, and the part's gradients;
* at the optimizer step: the sharded gradients.

Padding and the allocator's rounding only add to it. Reserved is never less than allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdpsim.costs import Costs
from fsdpsim.kernels.coarse import levels
from fsdpsim.scenario import Scenario
from fsdpsim.scenario.runtimes import Ddp, Fsdp1, Fsdp2, Textbook
from fsdpsim.scenario.schema import strategy_of
from fsdpsim.sharding import flat_parameter, per_parameter
from fsdpsim.simulate import build_optimizer
from fsdpsim.workload import DTYPE_BYTES, Kernel, Param, Part, Unit, Workload, nbytes

#: Runtimes that the notes speak of; of others nothing is known, and their bounds are zero.
BOUNDED = (Textbook, Ddp, Fsdp1, Fsdp2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBounds:
    """What no schedule of this configuration can go below."""

    step_time: float
    """Seconds."""
    peak_bytes: float
    """Bytes of ``allocated``, hence of ``reserved``."""
    tokens: int
    """Tokens per GPU and step, exactly; 0 when the scenario does not say."""

    @property
    def seconds_per_token(self) -> float:
        """The least time per token; infinite when tokens are not known."""
        return self.step_time / self.tokens if self.tokens else float("inf")


def lower_bounds(scenario: Scenario, workload: Workload, costs: Costs) -> LowerBounds:
    """The bounds of one configuration."""
    training = scenario.training
    forwards = training.gradient_accumulation_steps * training.forwards_per_backward
    tokens = workload.tokens * forwards
    if not isinstance(scenario.fsdp, BOUNDED) or _offloads(scenario):
        return LowerBounds(step_time=0.0, peak_bytes=0.0, tokens=tokens)
    calls = list(_calls(scenario, workload))
    compute = forwards * sum(_compute_seconds(call, costs) for call in calls)
    seconds = [compute, *_communication_seconds(scenario, workload, costs)]
    # A kernel that jitters may be faster than its cost.
    jitters = scenario.noise is not None and scenario.noise.jitter > 0
    return LowerBounds(
        step_time=0.0 if jitters else max(seconds),
        peak_bytes=_peak(scenario, workload, calls),
        tokens=tokens,
    )


def _offloads(scenario: Scenario) -> bool:
    """Whether host memory may hold what the notes count, and CPUs work where the GPU would wait."""
    tables = (scenario.fsdp, scenario.training)
    return any(
        "offload" in key and getattr(table, key)
        for table in tables
        for key in type(table).model_fields
    )


def capacity(scenario: Scenario) -> int:
    """Bytes that the allocator has at most: the device less the CUDA context."""
    hardware = scenario.device
    return max(hardware.memory - hardware.memory_outside_allocator(0), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One run of a part in one forward, and whether backward comes back to it."""

    part: Part
    unit: Unit | None
    """None outside all units."""
    has_backward: bool


def _calls(scenario: Scenario, workload: Workload) -> Iterator[_Call]:
    units = {unit.name: unit for unit in workload.units}
    parts = {part.name: part for part in workload.parts}
    textbook = isinstance(scenario.fsdp, Textbook)
    order = parts if textbook or not workload.calls else workload.calls
    # Autograd comes back to what a trained parameter feeds; the lecture's runtime to everything.
    seen = textbook
    for part in (parts[name] for name in order):
        unit = units.get(part.unit)
        if unit is None and textbook:
            continue
        seen = seen or any(_trained(part, unit))
        yield _Call(part=part, unit=unit, has_backward=seen)


def _trained(part: Part, unit: Unit | None) -> Iterator[Param]:
    for param in unit.params if unit is not None else ():
        if param.requires_grad and (part.params is None or param.name in part.params):
            yield param


# ---- time


def _compute_seconds(call: _Call, costs: Costs) -> float:
    part = call.part
    kernels: list[Kernel] = [*part.forward]
    if call.has_backward:
        kernels += [*part.recompute, *part.backward]
    return sum(map(costs.kernel, kernels))


def _communication_seconds(scenario: Scenario, workload: Workload, costs: Costs) -> Iterator[float]:
    """For each communicator the seconds of the collectives that every step has."""
    fsdp = scenario.fsdp
    several = isinstance(fsdp, Textbook) and scenario.iterations > 1
    if isinstance(fsdp, Ddp) or scenario.shard_factor == 1 or several:
        return
    calls = [call for call in _calls(scenario, workload) if call.unit is not None]
    called = {call.part.unit for call in calls}
    back = {call.part.unit for call in calls if call.has_backward}
    units = [unit for unit in workload.units if unit.params and unit.name in called]
    again = [unit for unit in units if unit.name in back and _freed_by_forward(unit, scenario)]
    gathers = sum(_all_gather_seconds(unit, scenario, costs) for unit in (*units, *again))
    trained = [unit for unit in units if all(p.requires_grad for p in unit.params)]
    scatters = sum(_reduce_scatter_seconds(unit, scenario, costs) for unit in trained)
    if isinstance(fsdp, Fsdp2) and fsdp.separate_reduce_scatter_group:
        yield from (gathers, scatters)
    else:
        yield gathers + scatters


def _freed_by_forward(unit: Unit, scenario: Scenario) -> bool:
    """Whether backward must gather the unit again, over all of its group."""
    fsdp = scenario.fsdp
    if unit.is_root or isinstance(fsdp, Textbook):
        return False
    if isinstance(fsdp, Fsdp1):
        strategy = strategy_of(fsdp, scenario.shard_factor, scenario.world_size)
        return strategy in ("FULL_SHARD", "HYBRID_SHARD")
    return (
        isinstance(fsdp, Fsdp2)
        and fsdp.reshard_after_forward in (None, True)
        and not fsdp.overrides
    )


def _all_gather_seconds(unit: Unit, scenario: Scenario, costs: Costs) -> float:
    quantised = getattr(scenario.fsdp, "all_gather_dtype", None)
    dtype = quantised or scenario.param_dtype or unit.params[0].dtype
    return costs.collective(
        "all_gather", nbytes(_padded(unit, scenario), dtype), dtype, "shard", unit.name
    )


def _reduce_scatter_seconds(unit: Unit, scenario: Scenario, costs: Costs) -> float:
    dtype = scenario.reduce_dtype or scenario.param_dtype or unit.params[0].dtype
    return costs.collective(
        "reduce_scatter", nbytes(_padded(unit, scenario), dtype), dtype, "shard", unit.name
    )


def _padded(unit: Unit, scenario: Scenario) -> int:
    """Elements that are gathered, as the runtime pads them."""
    fsdp, factor = scenario.fsdp, scenario.shard_factor
    if isinstance(fsdp, Fsdp2):
        return per_parameter(unit.params, factor).padded
    dtype = scenario.param_dtype or unit.params[0].dtype
    aligned = isinstance(fsdp, Fsdp1) and fsdp.use_orig_params
    return flat_parameter(unit.params, factor, compute_dtype=dtype, use_orig_params=aligned).padded


# ---- memory


def _peak(scenario: Scenario, workload: Workload, calls: list[_Call]) -> float:
    params = [param for unit in workload.units for param in unit.params]
    factor = scenario.shard_factor
    trained = [param for param in params if param.requires_grad]
    weights = sum(p.numel * _resident_bytes(p, scenario) for p in params) / factor
    state = sum(p.numel for p in trained) * build_optimizer(scenario).state_bytes / factor
    reduced = {p.name for call in calls for p in _trained(call.part, call.unit)}
    gradients = sum(p.numel * _least_bytes(p, scenario) for p in trained if p.name in reduced)
    steady = scenario.iterations > 1 or isinstance(scenario.fsdp, Textbook)
    passes = max(_levels(scenario, calls), default=0.0)
    return weights + max(state + gradients / factor, passes + (state if steady else 0.0))


def _levels(scenario: Scenario, calls: Iterable[_Call]) -> Iterator[float]:
    """Bytes beyond the resident ones at each moment of the note above."""
    kept = 0.0
    for call in calls:
        unsharded, gradients = _working_bytes(call, scenario)
        own = _kept_bytes(call.part) if call.has_backward else 0
        yield kept + own + unsharded
        if call.has_backward:
            yield kept + gradients + (unsharded if _gathers_in_backward(scenario) else 0)
        kept += own


def _kept_bytes(part: Part) -> int:
    sizes = {tensor.name: tensor.nbytes for kernel in part.forward for tensor in kernel.allocates}
    return max(levels(part.forward, sizes)[1], 0)


def _working_bytes(call: _Call, scenario: Scenario) -> tuple[float, float]:
    """(unsharded parameters of the call's unit, gradients of its part); none without sharding."""
    if call.unit is None or scenario.shard_factor == 1:
        return 0, 0
    size = {p.name: p.numel * _compute_bytes(p, scenario) for p in call.unit.params}
    trained = _trained(call.part, call.unit)
    return sum(size.values()), sum(p.numel * _least_bytes(p, scenario) for p in trained)


def _gathers_in_backward(scenario: Scenario) -> bool:
    fsdp = scenario.fsdp
    return not isinstance(fsdp, Fsdp2) or all(
        override.unshard_in_backward for override in fsdp.overrides.values()
    )


def _compute_bytes(param: Param, scenario: Scenario) -> int:
    return DTYPE_BYTES[scenario.param_dtype or param.dtype]


def _resident_bytes(param: Param, scenario: Scenario) -> int:
    """Bytes per element of the shard: of the original dtype, or in the lecture the compute's."""
    if isinstance(scenario.fsdp, Textbook):
        return _compute_bytes(param, scenario)
    return DTYPE_BYTES[param.dtype]


def _least_bytes(param: Param, scenario: Scenario) -> int:
    """Bytes per element of a gradient, in whichever dtype the runtime holds it."""
    dtypes = (param.dtype, scenario.param_dtype, scenario.reduce_dtype)
    return min(DTYPE_BYTES[dtype] for dtype in dtypes if dtype is not None)
