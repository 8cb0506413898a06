"""Backend options: frozen, checked once, with the environment below them.

``torch.compile(model, backend="graphbuf", options={...})`` and ``GRAPHBUF_<OPTION>`` environment
variables end here; code behind this module gets settled values. Options win over the environment,
the environment over the defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from compile_backend.errors import ConfigError

__all__ = [
    "CompilerName",
    "CudagraphMode",
    "EngineName",
    "GraphbufConfig",
    "check_choice",
    "check_count",
    "check_flag",
    "check_known",
    "check_mapping",
    "check_op_names",
    "check_path",
    "check_sizes",
    "check_values",
    "make_option",
    "options_by_name",
]

EngineName = Literal["auto", "none", "host", "host_strict", "cuda", "trees"]
CompilerName = Literal["eager", "aot_eager", "inductor"]
CudagraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]

_ENV_PREFIX = "GRAPHBUF_"

# What ``torch.compile(mode=...)`` means here: the mode's Inductor settings for the pieces, and
# whether graphs are captured. Graphs are this backend's default, so "reduce-overhead" adds nothing.
_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {"inductor_options": {"max_autotune": True}},
    "max-autotune-no-cudagraphs": {
        "inductor_options": {"max_autotune": True},
        "cudagraph_mode": "NONE",
    },
}


def make_option(
    default: Any, doc: str, check: Callable[[str, Any], Any], *, factory: bool = False
) -> Any:
    """A dataclass field whose value is settled by ``check(name, value)``; ``doc`` is for people."""
    metadata = {"doc": doc, "check": check}
    if factory:
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_choice(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise ConfigError(f"option {name!r} is {value!r}; choose one of {', '.join(choices)}")
        return str(value)

    return check


def check_flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(f"option {name!r} is {value!r} ({type(value).__name__}); pass True or False")


def check_count(minimum: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(
                f"option {name!r} is {value!r} ({type(value).__name__}); "
                f"pass an integer of at least {minimum}"
            )
        return value

    return check


def check_sizes(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError(
            f"option {name!r} is {value!r} ({type(value).__name__}); "
            "pass a list of increasing positive integers, such as [1, 2, 4, 8]"
        )
    sizes = tuple(value)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"option {name!r} holds {size!r} ({type(size).__name__}); "
                "every size is a positive integer"
            )
    if not sizes:
        raise ConfigError(f"option {name!r} is empty; pass at least one size, or None for defaults")
    for smaller, larger in itertools.pairwise(sizes):
        if larger <= smaller:
            raise ConfigError(
                f"option {name!r} is {list(sizes)}: {larger} follows {smaller}; "
                f"list the sizes in increasing order: {sorted(set(sizes))}"
            )
    return sizes


def check_op_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError(
            f"option {name!r} is {value!r} ({type(value).__name__}); "
            "pass a list of operator names, such as ['mylib::attention']"
        )
    for op in value:
        if not isinstance(op, str) or op.count("::") != 1 or not all(op.split("::")):
            raise ConfigError(
                f"option {name!r} holds {op!r}; write an operator as 'namespace::name' "
                "or 'namespace::name.overload'"
            )
    return tuple(value)


def check_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(
            f"option {name!r} is {value!r} ({type(value).__name__}); "
            "pass a dict of Inductor settings, such as {'max_autotune': True}"
        )
    return dict(value)


def check_path(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, (str, os.PathLike)) and os.fspath(value)):
        return None if value is None else os.fspath(value)
    raise ConfigError(f"option {name!r} is {value!r}; pass the path of a directory")


def options_by_name(config: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The options of a config class made of :func:`make_option` fields."""
    return {option.name: option for option in dataclasses.fields(config)}


def check_known(config: type[Any], name: str, what: str) -> None:
    """Raise ConfigError, with a near name and every option, unless ``config`` has option ``name``.

    ``what`` begins the message: it says where the name was found.
    """
    options = options_by_name(config)
    if name not in options:
        near = difflib.get_close_matches(name, options, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        listed = "".join(f"\n  {known}: {f.metadata['doc']}" for known, f in options.items())
        raise ConfigError(f"{what} is unknown{hint} The options are:{listed}")


def check_values(config: Any) -> None:
    """Replace every option of the frozen ``config`` by what its check makes of it.

    For ``__post_init__``. Raises ConfigError naming the first option with a bad value.
    """
    for option in dataclasses.fields(config):
        checked = option.metadata["check"](option.name, getattr(config, option.name))
        object.__setattr__(config, option.name, checked)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphbufConfig:
    """The options of ``torch.compile(..., backend="graphbuf", options={...})``."""

    engine: EngineName = make_option(
        "auto",
        "how graphs are captured: auto picks by device; none runs the pieces uncaptured",
        check_choice(*get_args(EngineName)),
    )
    compiler: CompilerName = make_option(
        "inductor", "what compiles a piece", check_choice(*get_args(CompilerName))
    )
    inductor_options: Mapping[str, Any] = make_option(
        dict, "Inductor settings for the pieces", check_mapping, factory=True
    )
    cudagraph_mode: CudagraphMode = make_option(
        "FULL_AND_PIECEWISE",
        "FULL captures the whole graph, PIECEWISE the segments between splitting_ops, "
        "FULL_AND_PIECEWISE tries FULL first, NONE captures nothing",
        check_choice(*get_args(CudagraphMode)),
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = make_option(
        None,
        "sizes of the batch axis that are captured; other sizes are padded to the next one",
        check_sizes,
    )
    second_axis_capture_sizes: tuple[int, ...] | None = make_option(
        None,
        "the same for a second padded axis (a sequence, or tokens beside requests); "
        "None repeats cudagraph_capture_sizes",
        check_sizes,
    )
    splitting_ops: tuple[str, ...] = make_option(
        (),
        "operators kept out of every piece, and of every graph in PIECEWISE mode; where the batch "
        "is declared, custom ones are also vouched to be row-wise",
        check_op_names,
    )
    rowwise_ops: tuple[str, ...] = make_option(
        (), "custom operators vouched to compute each row from that row alone", check_op_names
    )
    max_exact_captures: int = make_option(
        8,
        "how many exact sizes one traced graph may capture where nothing is padded",
        check_count(0),
    )
    max_number_values: int = make_option(
        4, "how many values of a number argument may be captured for one bucket", check_count(1)
    )
    max_recaptures: int = make_option(
        8, "how often a bucket may be captured again because an address changed", check_count(0)
    )
    dynamic_batch: bool = make_option(
        True, "trace with a symbolic batch size at once, not at the second size", check_flag
    )
    copy_outputs: bool = make_option(
        True, "outputs are the caller's to keep; False hands out views of graph memory", check_flag
    )
    check_padding: bool = make_option(
        False,
        "at the first call of a bucket that leaves a tail, run twice with different tails and "
        "compare live rows",
        check_flag,
    )
    strict: bool = make_option(
        False,
        "raise FallbackError where a call has a fall-back reason: it would run uncaptured, or at "
        "its exact size although padding was asked for",
        check_flag,
    )
    debug_dump_path: str | None = make_option(
        None, "directory that receives the graphs and pieces as readable code", check_path
    )

    def __post_init__(self) -> None:
        check_values(self)

    @classmethod
    def check(
        cls, options: Mapping[str, Any] | None = None, *, env: Mapping[str, str] | None = None
    ) -> GraphbufConfig:
        """The settled config for ``options``, over ``GRAPHBUF_*`` of ``env``, over the defaults.

        ``torch.compile`` checks options at the first call; call this to check them at once.
        ``env`` defaults to ``os.environ``. Raises ConfigError for an unknown option (listing the
        valid ones), a value of the wrong type, or sizes that do not increase.
        """
        settled = cls._from_env(os.environ if env is None else env)
        for name in options or {}:
            check_known(cls, name, f"option {name!r}")
            settled.pop(name, None)
        return cls(**cls._checked(settled), **(options or {}))

    @classmethod
    def for_mode(
        cls,
        mode: str | None,
        options: Mapping[str, Any] | None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> GraphbufConfig:
        """As :meth:`check`, below the meaning of ``torch.compile(mode=...)``.

        ``default`` and ``reduce-overhead`` change nothing (graphs are captured anyway),
        ``max-autotune`` autotunes the pieces, ``max-autotune-no-cudagraphs`` also captures
        nothing. Options win over the mode.
        """
        if mode is not None and mode not in _MODES:
            raise ConfigError(f"mode is {mode!r}; choose one of {', '.join(_MODES)}")
        return cls.check({**_MODES[mode or "default"], **(options or {})}, env=env)

    @classmethod
    def _from_env(cls, env: Mapping[str, str]) -> dict[str, Any]:
        settled: dict[str, Any] = {}
        for variable in sorted(env):
            if variable.startswith(_ENV_PREFIX):
                name = variable.removeprefix(_ENV_PREFIX).lower()
                check_known(cls, name, f"environment variable {variable}")
                settled[name] = _parse(name, variable, env[variable])
        return settled

    @classmethod
    def _checked(cls, from_env: Mapping[str, Any]) -> dict[str, Any]:
        """Check what the environment gave, so that an error names the variable."""
        for name, value in from_env.items():
            try:
                cls(**{name: value})
            except ConfigError as error:
                raise ConfigError(
                    f"environment variable {_ENV_PREFIX}{name.upper()}: {error}"
                ) from None
        return dict(from_env)

    @property
    def captures(self) -> bool:
        """Whether anything is captured at all."""
        return self.engine != "none" and self.cudagraph_mode != "NONE"


def _parse(name: str, variable: str, text: str) -> Any:
    """An environment variable's text as the value of option ``name``; checks come later."""
    kind = str(options_by_name(GraphbufConfig)[name].type)
    if kind == "bool":
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"environment variable {variable} is {text!r}; use 1 or 0")
    try:
        if kind == "int":
            return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {variable} is {text!r}; use an integer") from None
    try:
        if kind.startswith("tuple[int"):
            return tuple(int(part) for part in text.split(",")) if text.strip() else None
    except ValueError:
        raise ConfigError(
            f"environment variable {variable} is {text!r}; use integers separated by commas"
        ) from None
    if kind.startswith("tuple[str"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind.startswith("Mapping"):
        pairs = (part.split("=", 1) for part in text.split(",") if part.strip())
        try:
            return {key.strip(): _scalar(value.strip()) for key, value in pairs}
        except ValueError:
            raise ConfigError(
                f"environment variable {variable} is {text!r}; use name=value,name=value"
            ) from None
    return text or None if name == "debug_dump_path" else text


def _scalar(text: str) -> bool | int | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.lstrip("-").isdigit() else text
