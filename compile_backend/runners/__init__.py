"""Runners: what serves a forward mode by using a registry and an engine."""

from compile_backend.runners.base import BaseRunner, ServedModel
from compile_backend.runners.decode import DecodeCudaGraphRunner
from compile_backend.runners.eager import EagerRunner
from compile_backend.runners.model_runner import ModelRunner
from compile_backend.runners.output import ForwardOutput
from compile_backend.runners.prefill import PrefillCudaGraphRunner

__all__ = [
    "BaseRunner",
    "DecodeCudaGraphRunner",
    "EagerRunner",
    "ForwardOutput",
    "ModelRunner",
    "PrefillCudaGraphRunner",
    "ServedModel",
]
