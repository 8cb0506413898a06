"""Passes: what is read off a traced graph, and the rewrites that follow. One idea a module."""
