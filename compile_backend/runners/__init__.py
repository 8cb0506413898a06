"""Runners: what serves a forward mode by using a registry and an engine. None is built yet."""
