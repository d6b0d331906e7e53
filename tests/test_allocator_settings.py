"""The options of PYTORCH_CUDA_ALLOC_CONF, and how sizes are rounded under them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.allocator import AllocatorSettings
from fsdpsim.allocator.settings import NUM_DIVISION_SLOTS
from fsdpsim.allocator.sizes import MIB, SMALL_SIZE, UNLIMITED, round_size, segment_size

NO_DIVISIONS = (0,) * NUM_DIVISION_SLOTS
parse = AllocatorSettings.parse_conf


def test_defaults() -> None:
    settings = AllocatorSettings()
    assert settings.max_split_size == UNLIMITED
    assert settings.large_segment_size == settings.max_non_split_rounding == 20 * MIB
    assert settings.memory_limit(1000) is None
    assert parse("") == settings


def test_the_configuration_string() -> None:
    settings = parse(
        "max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],per_process_memory_fraction:0.5,"
        "large_segment_size_mb:32,max_non_split_rounding_mb:64,throw_on_cudamalloc_oom:True"
    )
    assert settings == AllocatorSettings(
        max_split_size_mb=128,
        expandable_segments=True,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=[(256, 1), (512, 2), (1024, 4), (">", 8)],
        per_process_memory_fraction=0.5,
        large_segment_size_mb=32,
        max_non_split_rounding_mb=64,
        throw_on_cudamalloc_oom=True,
    )
    assert settings.memory_limit(1001) == 500


def test_options_outside_the_model_are_accepted() -> None:
    conf = "backend:native,pinned_use_cuda_host_register:True,release_lock_on_cudamalloc:True"
    assert parse(conf) == AllocatorSettings()


@pytest.mark.parametrize(
    ("notation", "slots"),
    [
        (4, (4,) * 16),
        ("4", (4,) * 16),
        ("[64:8]", (8,) * 7 + (0,) * 9),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[1:2,8:4]", (2, 0, 0, 4) + (0,) * 12),
        ("[65536:2]", (2,) * 16),
        ([[64, 8], [">", 2]], (8,) * 7 + (2,) * 9),
        ({"64": 8}, (8,) * 7 + (0,) * 9),
    ],
)
def test_roundup_power2_divisions(notation: object, slots: tuple[int, ...]) -> None:
    settings = AllocatorSettings.validated({"roundup_power2_divisions": notation})
    assert settings.roundup_power2_divisions == slots
    assert AllocatorSettings.validated(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_mb must be at least large_segment_size_mb"),
        ("max_non_split_rounding_mb:10", "max_non_split_rounding_mb must be at least"),
        ("large_segment_size_mb:10", "large_segment_size_mb: must be more than 10, not 10"),
        ("max_split_size_mb:many", "max_split_size_mb: .*, not 'many'"),
        ("garbage_collection_threshold:0", "garbage_collection_threshold: .*greater than 0"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold: .*less than 1"),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction: .*less than or equal"),
        ("expandable_segments:yes", "expandable_segments must be True or False, not 'yes'"),
        ("throw_on_cudamalloc_oom:maybe", "throw_on_cudamalloc_oom must be True or False"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions: .*power of two, not 3"),
        ("roundup_power2_divisions:[48:2]", "interval .* must be a power of two, not '48'"),
        ("roundup_power2_divisions:[>:2]", "'>' must be the last of several"),
        ("roundup_power2_divisions:[a]", "must be an integer or a list like"),
        ("max_split_size:128", "unknown allocator setting 'max_split_size'; did you mean"),
        ("backend:cudaMallocAsync", "no other backend is modelled"),
        ("max_split_size_mb", "cannot read 'max_split_size_mb' as key:value"),
    ],
)
def test_bad_values_give_one_line(conf: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(conf)
    assert "\n" not in str(caught.value)


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"max_spilt_size_mb.*; garbage_collection_threshold"):
        parse("max_spilt_size_mb:128,garbage_collection_threshold:2")


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        AllocatorSettings().expandable_segments = True  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs"):
        AllocatorSettings.model_validate({"expandable": True})


def test_a_snapshots_settings() -> None:
    recorded = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,large_segment_size_mb:32",
        "max_split_size": 128 * MIB,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(1 << i): 2 for i in range(16)},
    }
    assert AllocatorSettings.from_snapshot(recorded) == AllocatorSettings(
        max_split_size_mb=128,
        large_segment_size_mb=32,
        expandable_segments=True,
        roundup_power2_divisions=2,
    )
    assert AllocatorSettings.from_snapshot({"max_split_size": -1}) == AllocatorSettings()


@pytest.mark.parametrize(
    ("nbytes", "divisions", "rounded"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200, 4, 1536),
        (84 * MIB, 0, 84 * MIB),
        (84 * MIB, 4, 96 * MIB),
        (84 * MIB, 8, 88 * MIB),
        (400 * MIB, 2, 512 * MIB),
        (64 * MIB, 4, 64 * MIB),
    ],
)
def test_rounding_examples(nbytes: int, divisions: int, rounded: int) -> None:
    assert round_size(nbytes, (divisions,) * NUM_DIVISION_SLOTS) == rounded


DIVISIONS = st.lists(
    st.sampled_from([0, 1, 2, 4, 8, 64]), min_size=NUM_DIVISION_SLOTS, max_size=NUM_DIVISION_SLOTS
)


@given(st.integers(1, 1 << 40), DIVISIONS)
def test_laws_of_rounding(nbytes: int, divisions: list[int]) -> None:
    rounded = round_size(nbytes, divisions)
    assert nbytes <= rounded
    assert rounded % 512 == 0
    assert (rounded <= SMALL_SIZE) == (nbytes <= SMALL_SIZE)
    assert round_size(rounded, NO_DIVISIONS) == rounded
    assert segment_size(rounded, 20 * MIB) >= rounded
