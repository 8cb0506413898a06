"""Bucket sizes and their planner."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_backend.errors import ConfigError
from compile_backend.registry.buckets import (
    Buckets,
    default_capture_sizes,
    pad_to,
    padded_rows,
    plan_capture_sizes,
)


@pytest.mark.parametrize(
    ("n", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, None)]
)
def test_a_size_is_rounded_up_to_a_bucket_or_to_none(n, bucket):
    assert pad_to(n, (1, 2, 4, 8)) == bucket
    assert Buckets((1, 2, 4, 8)).pad_to(n) == bucket


def test_buckets_know_their_sizes():
    buckets = Buckets([2, 6])
    assert buckets.sizes == (2, 6)
    assert list(buckets) == [2, 6]
    assert (len(buckets), buckets.largest) == (2, 6)
    assert buckets == Buckets((2, 6))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((), "no capture size"),
        ((0, 1), "0"),
        ((-2,), "-2"),
        ((1, 2.0), "2.0"),
        ((True, 2), "True"),
        ((1, 4, 2), r"4 is followed by 2.*use \(1, 2, 4\)"),
        ((1, 2, 2), r"2 is followed by 2.*use \(1, 2\)"),
    ],
)
def test_sizes_that_make_no_buckets_are_refused(sizes, words):
    with pytest.raises(ConfigError, match=words):
        Buckets(sizes)


@pytest.mark.parametrize("largest", [1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 256, 500, 512, 4096])
def test_default_sizes_are_buckets_up_to_the_largest_with_bounded_waste(largest):
    buckets = Buckets(default_capture_sizes(largest))
    assert buckets.largest == largest
    for live in range(64, largest + 1):
        assert (buckets.pad_to(live) - live) * 8 < live
    with pytest.raises(ConfigError):
        default_capture_sizes(0)


def test_default_sizes_up_to_512():
    sizes = default_capture_sizes(512)
    assert len(sizes) == 51
    assert sizes[:7] == (1, 2, 4, 8, 16, 24, 32)


HISTOGRAMS = st.dictionaries(st.integers(0, 40), st.integers(0, 9), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(HISTOGRAMS, st.integers(1, 5))
def test_planned_sizes_pad_the_fewest_rows_there_can_be(histogram, max_buckets):
    live = sorted(size for size, count in histogram.items() if size and count)
    if not live:
        with pytest.raises(ConfigError):
            plan_capture_sizes(histogram, max_buckets)
        return
    planned = plan_capture_sizes(histogram, max_buckets)
    assert len(Buckets(planned)) <= max_buckets
    assert planned[-1] == live[-1]
    counted = {size: histogram[size] for size in live}
    best = min(
        padded_rows(counted, (*chosen, live[-1]))
        for number in range(min(max_buckets, len(live)))
        for chosen in combinations(live[:-1], number)
    )
    assert padded_rows(counted, planned) == best


def test_enough_buckets_pad_nothing():
    histogram = {3: 5, 9: 1, 20: 2}
    assert plan_capture_sizes(histogram, 10) == (3, 9, 20)
    assert padded_rows(histogram, (3, 9, 20)) == 0


def test_a_rare_size_does_not_get_a_bucket_of_its_own():
    assert plan_capture_sizes({4: 1, 5: 100, 30: 1}, 2) == (5, 30)


@pytest.mark.parametrize(
    ("histogram", "max_buckets"), [({}, 2), ({3: 0}, 2), ({3: 1}, 0), ({-3: 1}, 2), ({3: -1}, 2)]
)
def test_a_plan_needs_traffic_and_buckets(histogram, max_buckets):
    with pytest.raises(ConfigError):
        plan_capture_sizes(histogram, max_buckets)


def test_rows_above_the_largest_bucket_are_not_padded():
    assert padded_rows({3: 2, 9: 5}, (4, 8)) == 2
