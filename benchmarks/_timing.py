"""Interleaved timing: every contender runs in every round, so that a slow moment hits all alike."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Comparison", "Timing", "compare"]

MIN_SAMPLE_SECONDS = 5e-4  # a sample repeats a short function until it takes about this long


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of one contender, one sample per round."""

    name: str
    samples: tuple[float, ...]
    calls_per_sample: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        """The least disturbed sample, which a busy machine changes little."""
        return min(self.samples)

    @property
    def interquartile_range(self) -> float:
        if len(self.samples) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.samples, n=4)
        return third - first


@dataclass(frozen=True, slots=True)
class Comparison:
    """The timings of one comparison; ratios are to the first."""

    timings: tuple[Timing, ...]
    setup: str

    def ratio(self, name: str) -> float:
        """Median time of ``name`` over that of the first contender."""
        by_name = {timing.name: timing for timing in self.timings}
        return by_name[name].median / self.timings[0].median

    def __str__(self) -> str:
        width = max(len(timing.name) for timing in self.timings)
        lines = [
            self.setup,
            f"{'':{width}}  {'median':>11}  {'IQR':>11}  {'ratio':>6}  {'best':>11}  runs",
        ]
        for timing in self.timings:
            runs = f"{len(timing.samples)} x {timing.calls_per_sample}"
            lines.append(
                f"{timing.name:{width}}  {_text(timing.median)}  "
                f"{_text(timing.interquartile_range)}  {self.ratio(timing.name):6.2f}  "
                f"{_text(timing.best)}  {runs}"
            )
        return "\n".join(lines)


def compare(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 50,
    warmup: int = 10,
    calls_per_sample: int | None = None,
    quiet: bool = False,
) -> Comparison:
    """Time each contender ``rounds`` times, in turn, after ``warmup`` calls each.

    Every other round goes through them in reverse. A sample is the mean of as many calls as take
    about half a millisecond (``calls_per_sample`` sets it); on an accelerator it ends with a
    synchronisation. Prints the table unless ``quiet``.
    """
    counts: dict[str, int] = {}
    for name, function in contenders.items():
        for _ in range(max(warmup, 1)):
            function()
        once = min(_sample(function, 1) for _ in range(5))
        counts[name] = calls_per_sample or max(1, round(MIN_SAMPLE_SECONDS / max(once, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        order = list(contenders.items())
        for name, function in order if index % 2 == 0 else reversed(order):
            samples[name].append(_sample(function, counts[name]))
    timings = tuple(Timing(name, tuple(samples[name]), counts[name]) for name in contenders)
    comparison = Comparison(timings, describe_setup())
    if not quiet:
        print(comparison)
    return comparison


def describe_setup() -> str:
    """Device, torch and Python versions, and threads, in one line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return (
        f"device: {device}; torch {torch.__version__}; Python {platform.python_version()}; "
        f"threads: {torch.get_num_threads()}"
    )


def _sample(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def _text(seconds: float) -> str:
    for unit, scale in (("s ", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:8.2f} {unit}"
    raise AssertionError("microseconds hold every time")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()
