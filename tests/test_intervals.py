"""Sets of time, against sets of whole seconds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fsdpsim.intervals import Interval, clip, subtract, total, union

times = st.integers(0, 30)
intervals = st.lists(st.tuples(times, times), max_size=12)


def seconds(found: list[Interval]) -> set[int]:
    """The whole seconds [t, t + 1) that intervals with whole bounds cover."""
    return {t for start, end in found for t in range(int(start), int(end))}


def is_canonical(found: list[Interval]) -> bool:
    """Sorted, disjoint and not even touching, none empty."""
    return all(a < b for a, b in found) and all(a[1] < b[0] for a, b in pairwise(found))


@given(intervals)
def test_union_covers_the_same_time_once(given_: list[Interval]) -> None:
    merged = union(given_)
    assert is_canonical(merged)
    assert seconds(merged) == seconds(given_)
    assert union(merged) == merged
    assert total(merged) == len(seconds(given_))


@given(intervals, intervals)
def test_subtract_is_set_difference(a: list[Interval], b: list[Interval]) -> None:
    left = subtract(union(a), union(b))
    assert is_canonical(left)
    assert seconds(left) == seconds(a) - seconds(b)


@given(intervals, intervals)
def test_what_is_left_and_what_was_taken_make_the_whole(
    a: list[Interval], b: list[Interval]
) -> None:
    whole, removed = union(a), union(b)
    left = subtract(whole, removed)
    taken = subtract(whole, left)
    assert total(left) + total(taken) == total(whole)
    assert seconds(taken) == seconds(a) & seconds(b)


@given(intervals, st.tuples(times, times))
def test_clip_is_intersection_with_a_window(given_: list[Interval], window: Interval) -> None:
    clipped = clip(union(given_), window)
    assert seconds(clipped) == seconds(given_) & seconds([window])


def test_by_hand() -> None:
    assert union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5), (7.0, 7.0)]) == [
        (0.0, 2.5),
        (3.0, 4.0),
    ]
    assert subtract([(0.0, 10.0)], [(1.0, 2.0), (9.0, 12.0)]) == [(0.0, 1.0), (2.0, 9.0)]
    assert clip([(0.0, 2.0), (3.0, 9.0)], (1.0, 4.0)) == [(1.0, 2.0), (3.0, 4.0)]
