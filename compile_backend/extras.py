"""Optional packages: imported where they are used, and asked for by the name of their extra."""

import importlib
from typing import Any

from compile_backend.errors import MissingExtraError

__all__ = ["import_extra"]


def import_extra(module: str, *, extra: str, needed_for: str) -> Any:
    """The module of that name, of the package that ``graphbuf[extra]`` installs.

    Raises MissingExtraError where the package is absent or cannot be loaded.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library of the package is missing
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package
        what = "is not installed" if is_absent else f"cannot be loaded ({error})"
        raise MissingExtraError(
            f"{needed_for} needs the package {package!r}, which {what}; "
            f'run: pip install "graphbuf[{extra}]"'
        ) from error
