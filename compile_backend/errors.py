"""The errors a user can meet, and the reasons for which a call is not replayed from a graph.

::

    GraphbufError
    ├── ConfigError                a backend option, environment variable or runner setting is wrong
    ├── RegistryError
    │   ├── SlotDefinitionError    a slot is declared in a way that cannot work
    │   ├── SlotNotFoundError      no slot of that name is registered
    │   ├── SlotNotAllocatedError  the slot is disabled, so it has no buffer
    │   ├── SlotMismatchError      a batch field does not fit its slot (dtype, device, rank, shape)
    │   └── SlotOverflowError      a batch field brings more rows than its slot holds
    ├── PassError                  a pass of the pipeline failed; names the pass
    ├── CaptureError               a function cannot be recorded; nothing was published
    ├── ReplayError                a recorded graph cannot be replayed as asked
    ├── PaddingError               two runs with different padding disagreed on a live row
    ├── ContextError               attention lacks what it needs of the forward pass around it
    ├── KVCacheError               a token slot or table row is asked for or given back wrongly
    ├── MissingExtraError          an optional package is needed; names the extra that installs it
    └── FallbackError              ``strict=True`` and a call would have run uncaptured

A fall-back is a result, not an error: it carries a :class:`FallbackReason`, is counted, and is
raised only under ``strict=True``.
"""

from enum import Enum

__all__ = [
    "CaptureError",
    "ConfigError",
    "ContextError",
    "FallbackError",
    "FallbackReason",
    "GraphbufError",
    "KVCacheError",
    "MissingExtraError",
    "PaddingError",
    "PassError",
    "RegistryError",
    "ReplayError",
    "SlotDefinitionError",
    "SlotMismatchError",
    "SlotNotAllocatedError",
    "SlotNotFoundError",
    "SlotOverflowError",
]


class GraphbufError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(GraphbufError, ValueError):
    """An option, environment variable or runner setting is unknown or has a bad value."""


class RegistryError(GraphbufError):
    """Base of the errors about slots and their buffers."""


class SlotDefinitionError(RegistryError, ValueError):
    """A slot, or a pair of slots that share a buffer, is declared in a way that cannot work."""


class SlotNotFoundError(RegistryError, KeyError):
    """No slot of that name is registered, or a batch lacks the field that a slot copies."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class SlotNotAllocatedError(RegistryError):
    """The slot is disabled: it has no buffer to view."""


class SlotMismatchError(RegistryError, ValueError):
    """A batch field does not fit its slot: dtype, device, rank or trailing shape."""


class SlotOverflowError(RegistryError, ValueError):
    """A batch field brings more rows than its slot holds."""


class PassError(GraphbufError):
    """A pass of the pipeline raised; the message names it, the cause is chained."""


class CaptureError(GraphbufError):
    """A function cannot be recorded on an engine. Nothing was published; other graphs still replay.

    ``reason`` is the :class:`FallbackReason` with which a caller may run the work uncaptured.
    """

    def __init__(self, message: str, reason: "FallbackReason | None" = None) -> None:
        super().__init__(message)
        self.reason = FallbackReason.CAPTURE_FAILED if reason is None else reason


class ReplayError(GraphbufError):
    """A recorded graph cannot be replayed as asked: it was reset, or an address has changed."""


class PaddingError(GraphbufError):
    """Two runs that differ only in their padded rows disagreed on a live row."""


class ContextError(GraphbufError):
    """An attention call lacks what it needs of the forward pass around it, or does not fit it."""


class KVCacheError(GraphbufError):
    """A token slot or a request's row is asked for, written or given back wrongly."""


class MissingExtraError(GraphbufError, ImportError):
    """An optional package that was asked for cannot be imported; names the extra to install."""


class FallbackError(GraphbufError):
    """``strict=True`` and a call would have run uncaptured. ``reason`` says why."""

    def __init__(self, message: str, reason: "FallbackReason") -> None:
        super().__init__(message)
        self.reason = reason


class FallbackReason(Enum):
    """Why a call was not replayed from a captured graph. The value is the text shown to people."""

    DISABLED = "capturing is switched off (engine 'none' or cudagraph_mode 'NONE')"
    NO_ENGINE = "no engine captures on the device of the model"
    GRAD_ENABLED = "gradients are needed: the ordinary compile path runs"
    ABOVE_LARGEST_BUCKET = "the batch is larger than the largest captured size"
    TOO_MANY_SIZES = "more distinct exact sizes than may be captured"
    PADDING_UNSAFE = "padded rows are not shown to stay away from live rows"
    OUTPUT_NOT_PREFIX = "the live rows of a value are not the first rows of one dimension"
    GUARD_FAILED = "a shape guard of the traced graph does not hold at the padded size"
    LIVE_SIZES_DIFFER = "arguments traced with one batch size came with different ones"
    NUMBER_VARIES = "a number argument took too many values for one bucket"
    MUTATED_INPUT = "the graph mutates an argument whose address is not fixed"
    ALIASED_OUTPUT = "an output is a view of an argument"
    LAYOUT = "an argument is not contiguous, or its view has other strides than were compiled"
    HOST_READ = "the graph reads a device value on the host"
    DATA_DEPENDENT_SHAPE = "a shape depends on values"
    CUDAGRAPH_UNSAFE = "an operator is tagged as unsafe in a captured graph"
    OTHER_DEVICE = "a tensor lives on another device than the graph"
    CAPTURE_FAILED = "recording the graph raised"
    NOTHING_TO_CAPTURE = "no compiled piece lies between the operators left out of the segments"
    NOT_CAPTURED = "no graph was captured for this size yet: warmup() was not called, or refused it"
    MODE_NOT_CAPTURED = "no graph runner serves this forward mode"
    VARIANT_NOT_TRACED = "the batch has other optional fields or flags than were traced"
    PADDING_WASTE = "the next captured size is too much larger than the batch"
    AUTOCAST = "autocast is on around the call, and graphs are captured without"
    MODEL_CHANGED = "a module was replaced, or switched between training and evaluation"
    WEIGHTS_UNTIED = "weights that were one tensor when the model was traced are several now"
    CONTEXT_PARALLEL = "context parallelism splits prefill between ranks, which no graph follows"
    MIXED_ENCODER = "some requests have an encoder output and some have none"
    RANKS_DIFFER = "another data-parallel rank runs no graph, and ranks meet in collectives"
    HIDDEN_STATES = "the batch wants more hidden states than were captured"
    STREAM_NOT_CAPTURED = "no graph was captured for this stream index"
    NO_TOKENS = "the batch has no token"
    NESTED_CALL = "the call was made inside another one, whose slots are in use"
    ALIASED_INPUTS = "arguments that the graph writes share memory with others as never before"
    ADDRESS_CHANGED = "a tensor with a fixed address moved too often to keep re-capturing"
