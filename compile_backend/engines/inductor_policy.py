"""Our engines under plain Inductor: ``torch._inductor.config.cudagraph_policy``.

For users of ``torch.compile(mode="reduce-overhead")`` who want our captures in place of Inductor's:

    with inductor_graphs(CudaEngine()):
        compiled = torch.compile(model, mode="reduce-overhead")
        compiled(x)

Inductor decides what may be captured and calls the policy for each graph. The setting exists since
torch 2.13 (it is not in 2.11); without it :func:`inductor_policy` raises ConfigError.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compile_backend.engines.base import Engine, Replay
from compile_backend.errors import ConfigError

__all__ = ["inductor_graphs", "inductor_policy"]

log = logging.getLogger(__name__)

Model = Callable[[list[Any]], Sequence[Any]]


def inductor_policy(engine: Engine, *, copy_outputs: bool = True, max_captures: int = 64) -> Any:
    """A ``CUDAGraphPolicy`` that captures each inference graph of Inductor on ``engine``.

    A graph is captured once for each combination of its numbers and input shapes, at the second
    call with them (the first runs it as it is, which settles lazy state), up to ``max_captures``;
    later ones run uncaptured. Inputs whose address may change are copied into static ones.
    ``copy_outputs=False`` returns the recording's own outputs, which the next replay overwrites.
    Graphs of training go Inductor's own way. Graphs that write to an input whose address is not
    fixed are not captured. A graph that cannot be captured raises CaptureError at its second call.

    Raises ConfigError where torch has no such setting.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor import cudagraph_utils

    base: Any = getattr(cudagraph_utils, "CUDAGraphPolicy", None)
    if base is None or not hasattr(inductor_config, "cudagraph_policy"):
        raise ConfigError(
            f"torch {torch.__version__} has no torch._inductor.config.cudagraph_policy, so "
            "Inductor cannot be given an engine; use torch 2.13 or newer, or "
            "torch.compile(backend='graphbuf') with this one"
        )

    class EnginePolicy(base):  # type: ignore[misc]  # the base is not in every torch
        """Inductor's graphs on one of our engines."""

        def cudagraphify(
            self,
            model: Model,
            example_inputs: Sequence[Any],
            static_input_idxs: Sequence[int],
            *,
            device_index: int,
            is_backward: bool,
            is_inference: bool,
            **kwargs: Any,
        ) -> Model:
            if not is_inference:
                trained: Model = super().cudagraphify(
                    model,
                    example_inputs,
                    static_input_idxs,
                    device_index=device_index,
                    is_backward=is_backward,
                    is_inference=is_inference,
                    **kwargs,
                )
                return trained
            moving = set(kwargs.get("mutated_input_idxs", ())) - set(static_input_idxs)
            if moving:
                log.warning(
                    "graphbuf: an Inductor graph writes to inputs %s, whose addresses are not "
                    "fixed; it runs uncaptured",
                    sorted(moving),
                )
                return model
            return _CapturedModel(
                engine,
                model,
                frozenset(static_input_idxs),
                copy_outputs=copy_outputs,
                max_captures=max_captures,
            )

    return EnginePolicy()


@contextmanager
def inductor_graphs(engine: Engine, *, copy_outputs: bool = True) -> Iterator[None]:
    """What Inductor compiles inside is captured on ``engine``; see :func:`inductor_policy`."""
    policy = inductor_policy(engine, copy_outputs=copy_outputs)
    import torch._inductor.config as inductor_config

    with inductor_config.patch("cudagraph_policy", policy):
        yield


class _CapturedModel:
    """What Inductor calls in place of one graph. Consumes its list of inputs, as the graph does."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        static_positions: frozenset[int],
        *,
        copy_outputs: bool,
        max_captures: int,
    ) -> None:
        self._engine = engine
        self._model = model
        self._static_positions = static_positions
        self._copy_outputs = copy_outputs and not engine.fresh_outputs
        self._max_captures = max_captures
        self._seen: set[tuple[Any, ...]] = set()
        self._captures: dict[tuple[Any, ...], _Capture] = {}

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        key = self._key(inputs)
        if key is None:
            return self._model(inputs)
        captured = self._captures.get(key)
        if captured is not None:
            outputs = captured.replay_with(inputs)
        elif key in self._seen:
            captured = _Capture(self._engine, self._model, inputs, self._static_positions)
            self._captures[key] = captured
            outputs = captured.replay.outputs
        else:
            if len(self._seen) < self._max_captures:
                self._seen.add(key)
            return self._model(inputs)
        inputs.clear()
        if self._copy_outputs:
            return [each.clone() if isinstance(each, Tensor) else each for each in outputs]
        return outputs

    def _key(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Numbers, shapes, and the addresses of static inputs; None for what has no place in it."""
        key: list[Any] = []
        for position, value in enumerate(inputs):
            if isinstance(value, int):
                key.append(value)
            elif not isinstance(value, Tensor):
                return None
            elif position in self._static_positions:
                key.append(value.data_ptr())
            else:
                key.append((value.shape, value.stride()))
        return tuple(key)


class _Capture:
    """One recording of a graph, with its static inputs."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        inputs: Sequence[Any],
        static_positions: frozenset[int],
    ) -> None:
        self._positions = [at for at, value in enumerate(inputs) if isinstance(value, Tensor)]
        tensors = [inputs[at] for at in self._positions]
        self._statics = [
            tensor if at in static_positions else _static_copy(tensor)
            for at, tensor in zip(self._positions, tensors, strict=True)
        ]
        numbers = [None if isinstance(value, Tensor) else value for value in inputs]

        def run(*tensors: Tensor) -> Sequence[Any]:
            arguments = list(numbers)
            for position, tensor in zip(self._positions, tensors, strict=True):
                arguments[position] = tensor
            return self._model_outputs(model, arguments)

        self.replay: Replay = engine.capture(run, static_inputs=self._statics)

    @staticmethod
    def _model_outputs(model: Model, arguments: list[Any]) -> Sequence[Any]:
        outputs = model(arguments)
        return outputs if isinstance(outputs, list | tuple) else [outputs]

    def replay_with(self, inputs: Sequence[Any]) -> list[Any]:
        for position, static in zip(self._positions, self._statics, strict=True):
            if static is not inputs[position]:
                _overwrite(static, inputs[position])
        return self.replay()


def _static_copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(mode=False):
        static = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return _overwrite(static, tensor)


def _overwrite(static: Tensor, tensor: Tensor) -> Tensor:
    if static.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            static.copy_(tensor)
    return static
