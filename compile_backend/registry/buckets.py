"""Bucket sizes: rounding a live size up to a captured one, and choosing which sizes to capture."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from compile_backend.errors import ConfigError

__all__ = ["Buckets", "default_capture_sizes", "pad_to", "padded_rows", "plan_capture_sizes"]


def pad_to(n: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the increasing ``sizes`` that is at least ``n``; None above the largest."""
    index = bisect_left(sizes, n)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True, slots=True)
class Buckets:
    """Captured sizes: one or more positive integers, strictly increasing.

    Raises ConfigError for anything else, naming the first pair that is out of order.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not self.sizes:
            raise ConfigError("no capture size is given; give at least one, such as (1, 2, 4, 8)")
        for size in self.sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(
                    f"capture size {size!r} in {self.sizes} is not a positive integer; remove it"
                )
        for smaller, larger in pairwise(self.sizes):
            if smaller >= larger:
                raise ConfigError(
                    f"capture sizes must increase strictly but {smaller} is followed by {larger} "
                    f"in {self.sizes}; use {tuple(sorted(set(self.sizes)))}"
                )

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    @property
    def largest(self) -> int:
        """The largest captured size."""
        return self.sizes[-1]

    def pad_to(self, n: int) -> int | None:
        """The bucket that ``n`` live rows run in; None above the largest."""
        return pad_to(n, self.sizes)


def default_capture_sizes(max_size: int) -> tuple[int, ...]:
    """Sizes up to and including ``max_size`` whose spacing grows with the size.

    1, 2, 4, then every 8th up to 256, every 16th up to 512, every 32nd up to 1024 and so on: the
    waste stays below one eighth from 64 rows on, at 51 sizes for 512 rows.
    """
    if max_size < 1:
        raise ConfigError(f"the largest capture size is {max_size}; it must be at least 1")
    sizes = [1, 2, 4]
    size, step = 8, 8
    while size < max_size:
        sizes.append(size)
        if size >= 32 * step:
            step *= 2
        size += step
    return (*(one for one in sizes if one < max_size), max_size)


def padded_rows(histogram: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Rows of padding that running ``histogram`` (live size to count) in ``sizes`` adds up to.

    Live sizes above the largest are run as they are and add nothing.
    """
    total = 0
    for live, count in histogram.items():
        bucket = pad_to(live, sizes)
        if bucket is not None:
            total += (bucket - live) * count
    return total


def plan_capture_sizes(histogram: Mapping[int, int], max_buckets: int) -> tuple[int, ...]:
    """At most ``max_buckets`` sizes that pad the fewest rows over ``histogram``.

    ``histogram`` maps a live size to how often it occurred. The result covers the largest live
    size; sizes of 0 and counts of 0 are left out. An optimum lies on live sizes, so this is a
    partition of the sorted sizes into runs, each padded to its last; the cost of a run satisfies
    the quadrangle inequality, so the best cut moves monotonically and divide and conquer solves a
    layer in n log n (F. F. Yao, "Efficient dynamic programming using quadrangle inequalities",
    1980).

    Raises ConfigError for an empty histogram, a negative count or size, or no bucket to give.
    """
    if max_buckets < 1:
        raise ConfigError(f"max_buckets is {max_buckets}; it must be at least 1")
    if any(size < 0 or count < 0 for size, count in histogram.items()):
        raise ConfigError(f"the histogram {dict(histogram)!r:.200} holds a negative size or count")
    live = sorted(size for size, count in histogram.items() if size and count)
    if not live:
        raise ConfigError("the histogram counts no batch; record some traffic first")

    counts = [0, *accumulate(histogram[size] for size in live)]
    rows = [0, *accumulate(size * histogram[size] for size in live)]

    def run_cost(first: int, end: int) -> int:
        """Rows of padding when sizes ``first`` to ``end - 1`` all run as the last of them."""
        return live[end - 1] * (counts[end] - counts[first]) - (rows[end] - rows[first])

    costs = [run_cost(0, end) if end else 0 for end in range(len(live) + 1)]
    cuts: list[list[int]] = []
    for _ in range(min(max_buckets, len(live)) - 1):
        costs, cut = _add_bucket(costs, run_cost)
        cuts.append(cut)

    end = len(live)
    chosen = [live[end - 1]]
    for cut in reversed(cuts):
        end = cut[end]
        if end == 0:
            break
        chosen.append(live[end - 1])
    return tuple(reversed(chosen))


def _add_bucket(
    costs: list[int], run_cost: Callable[[int, int], int]
) -> tuple[list[int], list[int]]:
    """Best costs with one more bucket, by sizes covered, and where the last run begins."""
    best, cut = list(costs), [0] * len(costs)
    spans = [(1, len(costs) - 1, 0, len(costs) - 1)]
    while spans:
        low, high, first_cut, last_cut = spans.pop()
        if low > high:
            continue
        end = (low + high) // 2
        best[end], cut[end] = min(
            (costs[at] + run_cost(at, end), at)
            for at in range(first_cut, min(last_cut, end - 1) + 1)
        )
        spans.append((low, end - 1, first_cut, cut[end]))
        spans.append((end + 1, high, cut[end], last_cut))
    return best, cut
