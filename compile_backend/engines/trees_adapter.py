"""Everything this package asks of ``torch._inductor.cudagraph_trees``, in one place.

The module is private to torch and its signatures move: what is called here is bound to the
signature that the installed torch has, arguments that only some versions know are left out where
they are unknown, and one that is needed and missing is a ConfigError. Read for torch 2.11 and 2.13;
``tests/engines/test_trees.py`` binds the calls for whatever is installed. Importing this file does
not import torch's, which takes a second.
"""

import inspect
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compile_backend.engines.graph_pool import finish_by_hand
from compile_backend.errors import ConfigError

__all__ = ["TreeFunction", "begin_step", "fitted", "load_trees", "tree_calls", "tree_pool"]

Model = Callable[[list[Any]], list[Any]]

# Parameters of cudagraphify() that may go: all default to nothing.
_DISPENSABLE = frozenset({"constants", "mutated_input_idxs", "placeholders", "compile_id"})
_CONTAINERS, _LOCKS = "tree_manager_containers", "tree_manager_locks"
# What the manager of a device must have.
MANAGER_ATTRIBUTES = ("cuda_graphs_thread_pool", "graph", "ids_to_funcs", "roots")


def begin_step() -> None:
    """Start a new generation: outputs of the one before may be overwritten from now on.

    This is ``torch.compiler.cudagraph_mark_step_begin``, which counts for all trees of the process,
    those of ``torch.compile(mode="reduce-overhead")`` too.
    """
    torch.compiler.cudagraph_mark_step_begin()


class TreeFunction:
    """One function under the trees of a device and of the calling thread.

    ``first_outputs`` are the results of the first call, which is recorded: trees' own warm-up run
    is left out, since whoever captures has done the warm-ups. ``stack_traces`` is what messages say
    of each output; the model may fill the list while it runs.
    """

    def __init__(
        self, model: Model, inputs: Sequence[Tensor], *, device: int, stack_traces: list[str | None]
    ) -> None:
        trees = _trees()
        args, kwargs = tree_calls(
            trees.cudagraphify, model, list(inputs), device=device, stack_traces=stack_traces
        )
        with _recording_at_once(), _finished_captures(device):
            self._run, self.first_outputs = trees.cudagraphify(*args, **kwargs)
        self._manager: Any = self._run.func.__self__
        self._function_id: Any = self._run.keywords["function_id"]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Replay the recording that fits these inputs; the model is called where none does."""
        outputs: list[Any] = self._run(list(inputs))
        return outputs

    @property
    def is_alive(self) -> bool:
        """False after ``torch.compiler.reset()``, which shuts the trees down."""
        return self._manager.graph is not None

    def forget(self) -> None:
        """Let go of the recordings. The current one goes with the next call of any other."""
        manager = self._manager
        if self.is_alive:
            for node in manager.roots.pop(self._function_id, []):
                node.remove_node_cached_tensors()
        manager.ids_to_funcs.pop(self._function_id, None)


def tree_pool(device: int) -> tuple[int, int] | None:
    """The id of the pool of the calling thread's trees on a device; None where it has none."""
    manager = _trees().get_manager(device, create_if_none_exists=False)
    return None if manager is None else manager.cuda_graphs_thread_pool


def tree_calls(
    cudagraphify: Callable[..., Any],
    model: Model,
    inputs: list[Any],
    *,
    device: int,
    stack_traces: list[str | None],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which ``cudagraphify`` is called: every input is static.

    Static inputs are read where they are. None counts as mutated, so that a function which writes
    to its inputs is captured all the same: their addresses are fixed.
    """
    wanted = {
        "device_index": device,
        "is_backward": False,
        "is_inference": True,
        "stack_traces": stack_traces,
        "constants": (),
        "placeholders": tuple(_placeholder(position) for position in range(len(inputs))),
        "mutated_input_idxs": (),
        "compile_id": None,
    }
    positional = (model, inputs, tuple(range(len(inputs))))
    return positional, fitted(cudagraphify, positional, wanted, dispensable=_DISPENSABLE)


def fitted(
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    dispensable: frozenset[str],
) -> dict[str, Any]:
    """``keywords`` without those of ``dispensable`` that ``function`` does not take.

    Raises ConfigError where the call still does not fit.
    """
    signature = inspect.signature(function)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    kept = {
        name: value
        for name, value in keywords.items()
        if takes_any or name in signature.parameters or name not in dispensable
    }
    try:
        signature.bind(*positional, **kept)
    except TypeError as error:
        raise ConfigError(
            f"torch {torch.__version__} has {function.__name__}{signature}, which does not fit the "
            f"call of the 'trees' engine ({error}); use engine='cuda' with this torch"
        ) from error
    return kept


def _placeholder(position: int) -> Any:
    from torch._inductor.cudagraph_utils import PlaceholderInfo

    about: dict[str, Any] = {
        "name": f"static input {position}",
        "stack_trace": None,
        "users": [],
        "mutating_use_stack_trace": None,
    }
    return PlaceholderInfo(
        **fitted(PlaceholderInfo, (), about, dispensable=frozenset(about) - {"name"})
    )


def load_trees() -> None:
    """Import torch's module on this thread, which should live as long as the process.

    The importing thread gets state that autograd's threads look up; with a thread that ends before
    the process does, that may abort the process at exit (seen in torch 2.11).
    """
    _trees()


def _trees() -> Any:
    """The module, with the state that it keeps for each thread."""
    from torch._inductor import cudagraph_trees

    local = cudagraph_trees.local
    if not hasattr(local, _CONTAINERS) and not torch._C._is_key_in_tls(_CONTAINERS):
        # In 2.11 only the thread that imports the module has it; 2.13 makes it, but also stashes
        # it for autograd's threads, see load_trees().
        setattr(local, _CONTAINERS, {})
        setattr(local, _LOCKS, defaultdict(threading.Lock))
    return cudagraph_trees


@contextmanager
def _recording_at_once() -> Iterator[None]:
    import torch._inductor.config as inductor_config

    with inductor_config.patch(
        {"triton.skip_cudagraph_warmup": True, "triton.force_cudagraphs_warmup": False}
    ):
        yield


@contextmanager
def _finished_captures(device: int) -> Iterator[None]:
    """Where a capture inside the block cannot be ended, clean up and take new trees from then on.

    The recordings that exist keep their manager and replay. A new manager's first capture is empty;
    it ends, and takes the random generators out of capture state.
    """
    try:
        yield
    except BaseException as error:
        pool = tree_pool(device)
        graph = _graph_being_recorded(error)
        if pool is not None and graph is not None and finish_by_hand(graph, pool, device):
            container = _trees().get_container(device)
            container.tree_manager = None
            container.get_tree_manager()
        raise


def _graph_being_recorded(error: BaseException) -> Any:
    """The graph of the node in whose constructor ``error`` was raised, or None."""
    node_type = _trees().CUDAGraphNode
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, node_type) and node.graph is not None:
            return node.graph
    return None
