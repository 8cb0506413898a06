"""Looking inside: what was captured, what fell back and why, and the graphs as readable code."""

from compile_backend.inspect.dump import dump, dump_graph
from compile_backend.inspect.explain import Explanation, explain

__all__ = ["Explanation", "dump", "dump_graph", "explain"]
