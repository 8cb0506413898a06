"""The contract of an engine: record a function once, run the recording many times.

::

    Engine.capture(fn, static_inputs=...) ──> Replay ──> Replay()  [outputs]

An engine is where "how is this captured and replayed" lives, and the only place. Two facts about
an engine decide how its caller must treat inputs and outputs:

``late_binding``
    True: a replay may be given other tensors than the captured ones. False: addresses are baked,
    so new values are copied into the captured tensors before the replay.
``fresh_outputs``
    True: every replay returns new tensors. False: the next replay overwrites what the last one
    returned, so an output that must survive is copied.

What every engine promises of :meth:`Engine.capture`: the recorded run is run once and is a real
call, whose results are ``Replay.outputs``; whatever happens, grad mode, mode stacks and the
garbage collector are left as they were found; on failure the random generators are too, nothing
is published, a retry works and other recordings keep replaying.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from compile_backend.errors import CaptureError, ReplayError

__all__ = ["Captured", "Engine", "NoEngine", "Replay", "about", "captured_outputs", "name_of"]

Captured = Callable[..., Sequence[Any]]
"""What an engine records: ``fn(*static_inputs)`` returns a flat list or tuple of tensors, ``None``
and plain numbers. A number is baked: every replay returns it again."""


class Replay(ABC):
    """A recorded function. Not thread-safe: two calls of one recording must not overlap."""

    @abstractmethod
    def __call__(self, inputs: Sequence[Tensor] | None = None) -> list[Any]:
        """Run the recorded work and return its outputs, in the order in which ``fn`` gave them.

        ``inputs`` replace the captured ``static_inputs`` position by position; ``None`` means the
        captured ones. With late binding they must have the captured shapes, strides and dtypes;
        without it they must be the captured memory. Raises ReplayError otherwise, and after
        ``reset()``, before anything has run.
        """

    @property
    @abstractmethod
    def outputs(self) -> list[Any]:
        """The results of the capturing call.

        On an engine without fresh outputs these are also the tensors that each replay writes. On
        one with fresh outputs the first replay drops them, so that a recording holds no results;
        asking later raises ReplayError.
        """

    def forget_inputs(self) -> None:
        """Stop keeping the captured inputs alive; every later replay must be given its inputs.

        Does nothing where addresses are baked: the recording needs the captured memory.
        """
        return

    @property
    @abstractmethod
    def externals(self) -> list[Tensor]:
        """Tensors the recording reads or writes that are neither inputs nor made by it.

        Parameters, caches, tables, in the order of first use. They are bound by reference: an
        update in place is seen by the next replay, a replacement is not, so whoever may replace
        one compares it before a replay.
        """

    @property
    @abstractmethod
    def pool_bytes(self) -> int:
        """Bytes of the storages that only this recording keeps alive; outputs that are dropped
        at the first replay do not count."""

    @property
    @abstractmethod
    def num_entries(self) -> int:
        """Calls that one replay makes."""

    @property
    def num_segments(self) -> int:
        """Stretches of recorded work: more than one only in a breakable recording."""
        return 1

    @abstractmethod
    def reset(self) -> None:
        """Free what the recording keeps; later calls raise ReplayError. Tensors that were already
        returned stay valid. Idempotent."""

    @abstractmethod
    def describe(self) -> str:
        """The recorded program as text that a person can read."""


class Engine(ABC):
    """How a function is captured and replayed."""

    name: ClassVar[str]
    late_binding: ClassVar[bool]
    fresh_outputs: ClassVar[bool]
    needs_warmup: ClassVar[bool] = False
    """Whether a function must have run before it is captured: kernels are tuned, loaded or given
    handles at their first call, which cannot be recorded."""
    runs_while_recording: ClassVar[bool] = True
    """Whether a capture that fails halfway has written what ran until then."""

    @abstractmethod
    def capture(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> Replay:
        """Run ``fn(*static_inputs)``, once, and record it.

        ``label`` is what messages call the recording; by default it is the name of ``fn``. The run
        happens without gradients. ``warmups`` unrecorded runs go first, for functions that
        settle lazy state; they run the function's side effects, so a function that mutates its
        arguments is captured with none. Random generators are put back after them.

        What replays is what ``fn`` does to tensors through torch, on this thread: not its other
        Python effects, and not tensors it makes elsewhere (another thread, ``from_numpy``), which
        become externals. A compiled callable inside ``fn`` is wrapped in a CompiledPiece.

        Raises CaptureError, whose ``reason`` says why, chained to what ``fn`` raised. ``fn`` is
        never run again to recover: the caller decides what an error after a mutation means.
        """

    def capture_breakable(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> Replay:
        """As :meth:`capture`, but a call of a ``no_graph`` function inside ``fn`` ends the segment:
        it runs as written, also at every replay, and the next segment begins after it.

        The recording is one Replay: segments and marked functions, in order. A marked function gets
        the tensors of the replay. Where it has a ``capture_stub``, the results of the capturing
        call are whatever the stub left. Where it fails halfway, what came before has run. Messages
        number the segments from 1; a marked function counts with the segment that it ends.

        An engine that cannot interrupt a capture raises CaptureError; one that can makes itself the
        thread's breaker (:mod:`.breakable`).
        """
        raise CaptureError(
            f"engine {self.name!r} cannot interrupt the capture of {name_of(fn, label)} to run a "
            "no_graph function; use an engine that can (cuda, host, host_strict), or capture "
            "piecewise with the compiler"
        )


class NoEngine(Engine):
    """Records nothing: a replay calls the function. What the other engines are compared with."""

    name = "none"
    late_binding = True
    fresh_outputs = True

    def capture(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> Replay:
        """Run ``fn`` and remember it; its exceptions propagate as they are."""
        for _ in range(warmups):
            fn(*static_inputs)
        return _CallAgain(fn, static_inputs)

    def capture_breakable(
        self,
        fn: Captured,
        *,
        static_inputs: Sequence[Tensor],
        warmups: int = 0,
        label: str | None = None,
    ) -> Replay:
        """As :meth:`capture`: marked functions just run, and no stub is called."""
        return self.capture(fn, static_inputs=static_inputs, warmups=warmups)


class _CallAgain(Replay):
    """What NoEngine returns: the function itself, called once per replay."""

    def __init__(self, fn: Captured, static_inputs: Sequence[Tensor]) -> None:
        self._fn: Captured | None = fn
        self._static_inputs = list(static_inputs)
        self._outputs: list[Any] | None = list(fn(*static_inputs))

    def __call__(self, inputs: Sequence[Tensor] | None = None) -> list[Any]:
        if self._fn is None:
            raise ReplayError("this recording was reset; capture the function again")
        self._outputs = None
        return list(self._fn(*(self._static_inputs if inputs is None else inputs)))

    @property
    def outputs(self) -> list[Any]:
        return captured_outputs(self._outputs)

    @property
    def externals(self) -> list[Tensor]:
        return []

    @property
    def pool_bytes(self) -> int:
        return 0

    @property
    def num_entries(self) -> int:
        return 1

    def forget_inputs(self) -> None:
        self._static_inputs = []

    def reset(self) -> None:
        self._fn = self._outputs = None
        self._static_inputs = []

    def describe(self) -> str:
        return f"calls {getattr(self._fn, '__qualname__', self._fn)!r}; nothing is recorded"


def name_of(fn: Captured, label: str | None) -> str:
    """How messages call a captured function: by its label, else by its own name."""
    return repr(label or getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def about(name: str, error: CaptureError) -> CaptureError:
    """Make the message of ``error`` begin with ``name``, unless it has that; returns ``error``."""
    message = str(error)
    if name not in message:
        error.args = (f"{name}: {message}",)
    return error


def captured_outputs(outputs: list[Any] | None) -> list[Any]:
    """``outputs`` as a list of its own, or ReplayError where a recording no longer has them."""
    if outputs is None:
        raise ReplayError(
            "the results of the capturing call are gone: the recording was replayed or reset; "
            "use what the replay returned"
        )
    return list(outputs)
