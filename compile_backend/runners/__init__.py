"""Runners: what serves a forward mode by using a registry and an engine."""

from compile_backend.runners.base import BaseRunner, ServedModel
from compile_backend.runners.breakable import BreakableCudaGraphRunner
from compile_backend.runners.decode import DecodeCudaGraphRunner
from compile_backend.runners.eager import EagerRunner
from compile_backend.runners.explain import RunnerExplanation
from compile_backend.runners.model_runner import ModelRunner
from compile_backend.runners.output import ForwardOutput
from compile_backend.runners.prefill import PrefillCudaGraphRunner

__all__ = [
    "BaseRunner",
    "BreakableCudaGraphRunner",
    "DecodeCudaGraphRunner",
    "EagerRunner",
    "ForwardOutput",
    "ModelRunner",
    "PrefillCudaGraphRunner",
    "RunnerExplanation",
    "ServedModel",
]
