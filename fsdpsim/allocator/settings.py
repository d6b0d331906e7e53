"""The options of ``PYTORCH_CUDA_ALLOC_CONF``, spelled exactly as torch spells them.

Source of names, defaults and ranges: ``c10/core/AllocatorConfig.cpp`` and
``c10/cuda/CUDAAllocatorConfig.h`` of pytorch 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from fsdpsim.allocator.sizes import DEFAULT_LARGE_SEGMENT_SIZE, MIB, MIN_LARGE_ALLOC, UNLIMITED

#: Slots of ``roundup_power2_divisions``: one per power of two from 1 MiB to 32 GiB.
NUM_DIVISION_SLOTS = 16

#: Options of torch that change nothing in what this model covers: the device's default pools.
OPTIONS_WITHOUT_EFFECT = frozenset(
    {
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "release_lock_on_cudamalloc",
        "graph_capture_record_stream_reuse",
    }
)

_PAIR = re.compile(r"\s*([a-z0-9_]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+?)\s*(?:,|$)")


class AllocatorSettings(BaseModel):
    """Settings of the caching allocator; the ``[allocator]`` table of a scenario.

    Raises ``pydantic.ValidationError`` (a ``ValueError``) for a value that torch refuses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    expandable_segments: StrictBool = False
    """Grow one virtual range per stream and pool by mapping pages, instead of cudaMalloc."""
    max_split_size_mb: StrictInt | None = None
    """MiB; blocks of at least this size are never split. None: no limit."""
    max_non_split_rounding_mb: StrictInt | None = None
    """MiB; how much larger than the request an oversize block may be. None: the large segment."""
    large_segment_size_mb: StrictInt = Field(default=DEFAULT_LARGE_SEGMENT_SIZE // MIB)
    """MiB; the segment shared by requests between 1 and 10 MiB, and the large page."""
    roundup_power2_divisions: Annotated[
        tuple[int, ...], BeforeValidator(lambda value: _division_slots(value))
    ] = (0,) * NUM_DIVISION_SLOTS
    """Steps between powers of two that requests are rounded to, by size; 0: round to 512 bytes."""
    garbage_collection_threshold: float | None = Field(default=None, gt=0, lt=1, strict=True)
    """Share of the memory limit above which old unused segments are freed; needs a fraction."""
    per_process_memory_fraction: float | None = Field(default=None, ge=0, le=1, strict=True)
    """Share of the device total that may be reserved; None or 1: no limit."""
    throw_on_cudamalloc_oom: StrictBool = False
    """Raise at once, without a retry, when the memory fraction would be exceeded."""

    @field_validator("large_segment_size_mb")
    @classmethod
    def _large_segment_exceeds_10_mib(cls, value: int) -> int:
        if value * MIB <= MIN_LARGE_ALLOC:
            raise ValueError("must be more than 10")
        return value

    @model_validator(mode="after")
    def _not_below_the_large_segment(self) -> Self:
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < self.large_segment_size_mb:
                raise ValueError(
                    f"{name} must be at least large_segment_size_mb"
                    f" ({self.large_segment_size_mb}), not {value}"
                )
        return self

    @property
    def max_split_size(self) -> int:
        """Bytes; ``2**64 - 1`` when unlimited."""
        return UNLIMITED if self.max_split_size_mb is None else self.max_split_size_mb * MIB

    @property
    def large_segment_size(self) -> int:
        """Bytes of the segment that requests between 1 and 10 MiB share."""
        return self.large_segment_size_mb * MIB

    @property
    def max_non_split_rounding(self) -> int:
        """Bytes by which an oversize block may exceed the request it serves."""
        if self.max_non_split_rounding_mb is None:
            return self.large_segment_size
        return self.max_non_split_rounding_mb * MIB

    def memory_limit(self, total_memory: int) -> int | None:
        """Bytes that may be reserved on a device of ``total_memory`` bytes; None: no limit."""
        fraction = self.per_process_memory_fraction
        return None if fraction is None or fraction >= 1 else int(fraction * total_memory)

    @classmethod
    def parse_conf(cls, conf: str) -> Self:
        """Read the ``key:value,key:value`` syntax of ``PYTORCH_CUDA_ALLOC_CONF``.

        Raises ``ValueError`` with one line that names every key at fault.
        """
        values: dict[str, Any] = dict(_conf_pairs(conf))
        if values.pop("backend", "native") != "native":
            raise ValueError("allocator backend must be 'native': no other backend is modelled")
        for key in OPTIONS_WITHOUT_EFFECT & values.keys():
            del values[key]
        return cls.validated({key: _from_conf(key, text) for key, text in values.items()})

    @classmethod
    def validated(cls, values: Mapping[str, Any]) -> Self:
        """Build settings from a table; all faults are reported in one line of a ``ValueError``."""
        faults = [_unknown_key(key) for key in values if key not in cls.model_fields]
        known = {key: value for key, value in values.items() if key in cls.model_fields}
        try:
            settings = cls.model_validate(known)
        except ValidationError as error:
            faults += [_fault(fault) for fault in error.errors()]
        if faults:
            raise ValueError("; ".join(faults))
        return settings

    @classmethod
    def from_snapshot(cls, recorded: Mapping[str, Any]) -> Self:
        """Settings in force when a snapshot was taken, from its ``allocator_settings``.

        The structured entries win over the configuration string, because
        ``_set_allocator_settings`` changes them at run time and leaves the string behind.
        """
        values = _recorded_conf(cls, recorded.get("PYTORCH_CUDA_ALLOC_CONF"))
        if "expandable_segments" in recorded:
            values["expandable_segments"] = bool(recorded["expandable_segments"])
        if "max_split_size" in recorded:
            values["max_split_size_mb"] = _recorded_mib(recorded["max_split_size"])
        if "garbage_collection_threshold" in recorded:
            values["garbage_collection_threshold"] = (
                recorded["garbage_collection_threshold"] or None
            )
        slots = recorded.get("roundup_power2_divisions")
        if isinstance(slots, Mapping):
            values["roundup_power2_divisions"] = slots
        return cls.validated(values)


def _recorded_conf(cls: type[AllocatorSettings], conf: object) -> dict[str, Any]:
    if not isinstance(conf, str) or not conf.strip():
        return {}
    return cls.parse_conf(conf).model_dump(exclude_unset=True)


def _recorded_mib(limit: object) -> int | None:
    if not isinstance(limit, int):
        raise ValueError(f"max_split_size is {limit!r}, not a number of bytes")
    return None if limit < 0 else limit // MIB


def _conf_pairs(conf: str) -> Iterable[tuple[str, str]]:
    position = 0
    while position < len(conf.rstrip()):
        pair = _PAIR.match(conf, position)
        if pair is None:
            raise ValueError(
                f"allocator configuration: cannot read {conf[position:]!r} as key:value"
            )
        yield pair[1], pair[2]
        position = pair.end()


def _from_conf(key: str, text: str) -> bool | float | str:
    """What torch reads from ``text``; what is no number stays text, for validation to refuse."""
    if key in ("expandable_segments", "throw_on_cudamalloc_oom"):
        if text not in ("True", "False"):
            raise ValueError(f"{key} must be True or False, not {text!r}")
        return text == "True"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _unknown_key(key: str) -> str:
    near = get_close_matches(key, AllocatorSettings.model_fields, n=1)
    return f"unknown allocator setting {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _fault(fault: Any) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    return f"{name}: {message}, not {fault['input']!r}" if name else message


def _division_slots(value: object) -> tuple[int, ...]:
    """Return the 16 slots that one of torch's notations for the divisions means."""
    if isinstance(value, str):
        value = _divisions_from_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return (_divisions(value),) * NUM_DIVISION_SLOTS
    if isinstance(value, Mapping):
        return _slots_from_pairs(list(value.items()))
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(item, (list, tuple)) and len(item) == 2 for item in value):
            return _slots_from_pairs([(mib, divisions) for mib, divisions in value])
        if len(value) == NUM_DIVISION_SLOTS:
            return tuple(_divisions(item) for item in value)
    raise ValueError('must be an integer or a list like "[256:1,512:2,>:4]"')


def _divisions_from_text(text: str) -> object:
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [tuple(item.strip() for item in pair.split(":")) for pair in text[1:-1].split(",")]
    return _integer(text)


def _slots_from_pairs(pairs: list[tuple[Any, Any]]) -> tuple[int, ...]:
    slots = [0] * NUM_DIVISION_SLOTS
    last = -1
    for position, (key, value) in enumerate(pairs):
        divisions = _divisions(value)
        if key == ">":
            if position == 0 or position != len(pairs) - 1:
                raise ValueError("'>' must be the last of several intervals")
            slots[last + 1 :] = [divisions] * (NUM_DIVISION_SLOTS - last - 1)
            continue
        last = min(_power_of_two(key, "interval (MiB)").bit_length() - 1, NUM_DIVISION_SLOTS - 1)
        first = 0 if position == 0 else last
        slots[first : last + 1] = [divisions] * (last + 1 - first)
    return tuple(slots)


def _divisions(value: object) -> int:
    number = _integer(value)
    return number if number == 0 else _power_of_two(number, "number of divisions")


def _power_of_two(value: object, what: str) -> int:
    number = _integer(value)
    if number <= 0 or number & (number - 1):
        raise ValueError(f"{what} must be a power of two, not {value!r}")
    return number


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is not an integer")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an integer") from None
