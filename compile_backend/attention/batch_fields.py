"""What attention reads of a batch, checked: each error names the field and what to do."""

from torch import Tensor

from compile_backend.attention.context import ForwardContext
from compile_backend.errors import ContextError
from compile_backend.forward_batch import ForwardBatch

__all__ = ["cache_locations", "extend_lengths", "on_requests", "unplanned"]


def on_requests(batch: ForwardBatch, field: str) -> Tensor:
    """The batch's field, which has one entry per request. Raises ContextError without it."""
    value: Tensor | None = getattr(batch, field)
    if value is None or value.shape != (batch.batch_size,):
        given = None if value is None else list(value.shape)
        raise ContextError(
            f"{batch.forward_mode.name} attention needs {field} of shape [{batch.batch_size}], one "
            f"per request; the batch has {given}; set it on the ForwardBatch"
        )
    return value


def extend_lengths(batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """New and cached tokens of each request, from the host lists. Raises ContextError where one is
    missing, or where they contradict ``extend_num_tokens``."""
    new = _host_lengths(batch, "extend_seq_lens_cpu")
    prefixes = _host_lengths(batch, "extend_prefix_lens_cpu")
    if batch.extend_num_tokens not in (None, sum(new)):
        raise ContextError(
            f"extend_num_tokens is {batch.extend_num_tokens}, but extend_seq_lens_cpu {new} adds "
            f"up to {sum(new)}; give the number of live tokens"
        )
    return new, prefixes


def _host_lengths(batch: ForwardBatch, field: str) -> list[int]:
    value: list[int] | None = getattr(batch, field)
    if value is None or len(value) != batch.batch_size or min(value, default=0) < 0:
        raise ContextError(
            f"{batch.forward_mode.name} attention needs {field}, a list of {batch.batch_size} "
            f"lengths of 0 or more, one per request; the batch has {value}; set it on the "
            "ForwardBatch"
        )
    return value


def cache_locations(context: ForwardContext, num_tokens: int) -> Tensor:
    """Where the first ``num_tokens`` tokens are written. Raises ContextError for fewer."""
    locations = context.forward_batch.out_cache_loc
    if locations is None or locations.shape[0] < num_tokens:
        given = None if locations is None else list(locations.shape)
        raise ContextError(
            f"attention needs out_cache_loc for {num_tokens} tokens; the batch has {given}; give "
            "the token slot of every token on the ForwardBatch"
        )
    return locations.narrow(0, 0, num_tokens)


def unplanned(context: ForwardContext) -> ContextError:
    """The error for metadata that is no plan for the batch's mode."""
    return ContextError(
        f"the metadata of the context is {type(context.metadata).__name__}, which is no plan for "
        f"{context.forward_batch.forward_mode.name}; make it with init_forward_metadata of the "
        "batch that the model runs on"
    )
