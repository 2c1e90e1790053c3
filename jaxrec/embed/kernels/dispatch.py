"""Which implementation of a primitive runs a call.

Every implementation says which calls it takes. The first that takes a call runs it, chosen for each
platform that the program may be lowered for; `use_kernels` or the environment variable
JAXREC_KERNELS name others, and `describe` tells what was chosen and why.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_NONE: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Some of the primitives, as functions of a module.

    The module has a function for each primitive that it implements, with the name and the
    arguments that `jaxrec.embed.kernels.reference` gives it, and those hints that it makes use of;
    and a function ``refuse(primitive, arguments) -> str | None``: why it does not take a call.

    Attributes:
        name: What users call it.
        platforms: Where it runs.
        by_default: Whether it runs without being named.
    """

    name: str
    platforms: tuple[str, ...]
    by_default: bool = True

    @property
    def module(self) -> Any:
        return importlib.import_module(f"jaxrec.embed.kernels.{self.name}")

    def refuse(self, primitive: str, arguments: Mapping[str, Any]) -> str | None:
        """Why a call is not taken; None: it is."""
        if not hasattr(self.module, primitive):
            return f"it has no {primitive}"
        return self.module.refuse(primitive, arguments)


IMPLEMENTATIONS = (
    Implementation("cpu", ("cpu",)),
    Implementation("reference", PLATFORMS),
    # Named only, until they have been measured on a card.
    Implementation("triton", ("cuda",), by_default=False),
    Implementation("mosaic", ("cuda",), by_default=False),
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs a call, platform by platform.

    Attributes:
        primitive: Name of the primitive.
        chosen: The name of the implementation for each platform.
        refused: Why others were passed over, by name.
    """

    primitive: str
    chosen: Mapping[str, str]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        platforms: dict[str, list[str]] = {}
        for platform, name in self.chosen.items():
            platforms.setdefault(name, []).append(platform)
        lines = [f"{self.primitive}:"]
        lines += [f"  {name} on {', '.join(where)}" for name, where in platforms.items()]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


_named: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "jaxrec_kernels", default=None
)


@contextlib.contextmanager
def use_kernels(*names: str) -> Iterator[None]:
    """Runs the primitives by the implementations named, in this order of preference.

    The environment variable JAXREC_KERNELS does the same for a whole process, its names separated
    by commas. Functions that were compiled before keep what was chosen then.

    Args:
        names: Names of implementations, such as "reference".

    Raises:
        ValueError: If there is no implementation of such a name; in the call of a primitive, if
            none of those named takes it.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> rows = jnp.array([3, 1, 3], jnp.int32)
        >>> with kernels.use_kernels("reference"):
        ...     kernels.build_runs(rows, num_rows=4).unique.tolist()
        [1, 3, 4]
    """
    _find(names)
    token = _named.set(names)
    try:
        yield
    finally:
        _named.reset(token)


def describe(primitive: str, *args: Any, **kwargs: Any) -> Choice:
    """What would run a call of a primitive, and why.

    Args:
        primitive: Name of the primitive, such as "pooled_lookup".
        *args: Its arguments, by position and by name. Arrays may be `jax.ShapeDtypeStruct`.
        **kwargs: See above.

    Raises:
        ValueError: If there is no such primitive, or no implementation takes the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> rows = jax.ShapeDtypeStruct((3,), jnp.int32)
        >>> with kernels.use_kernels("reference"):
        ...     print(kernels.describe("build_runs", rows, 4))
        build_runs:
          reference on cpu, cuda, rocm, tpu
    """
    arguments = _signature(primitive).bind(*args, **kwargs)
    arguments.apply_defaults()
    return choose(primitive, arguments.arguments)


def choose(primitive: str, arguments: Mapping[str, Any]) -> Choice:
    """`describe`, given the arguments by name."""
    chosen: dict[str, str] = {}
    refused: dict[str, str] = {}
    candidates = _candidates()
    for implementation in candidates:
        reason = implementation.refuse(primitive, arguments)
        if reason is not None:
            refused[implementation.name] = reason
            continue
        for platform in implementation.platforms:
            chosen.setdefault(platform, implementation.name)
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ValueError(
            f"no implementation named by use_kernels or JAXREC_KERNELS takes this {primitive}: "
            f"{reasons}. Name one that does after them, such as 'reference'"
        )
    in_order = {platform: chosen[platform] for platform in PLATFORMS if platform in chosen}
    return Choice(primitive, in_order, refused)


def call(
    primitive: str, arrays: dict[str, Any], hints: Mapping[str, Any] = _NONE, **static: Any
) -> Any:
    """Calls a primitive.

    Args:
        primitive: Its name.
        arrays: Its arguments that are pytrees of arrays, by name.
        hints: Arguments on which no result depends, by name; implementations need not take them.
        **static: The others; hashable.
    """
    choice = choose(primitive, arrays | static)
    if "cpu" in choice.refused:
        _warn_if_missing()
    fixed = tuple(static.items()), tuple(hints.items())
    return _run(arrays, primitive, tuple(choice.chosen.items()), *fixed)


@functools.cache
def _warn_if_missing() -> None:
    """Say once that a CPU computes without the native library."""
    reason = importlib.import_module("jaxrec.embed.kernels.cpu").missing()
    if reason is not None and jax.default_backend() == "cpu":
        warnings.warn(
            f"lookups and updates of tables run in XLA, up to twenty times slower: {reason}. "
            "JAXREC_KERNELS=reference chooses XLA without this warning",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4), inline=True)
def _run(
    arrays: dict[str, Any],
    primitive: str,
    chosen: tuple[tuple[str, str], ...],
    static: tuple[tuple[str, Any], ...],
    hints: tuple[tuple[str, Any], ...],
) -> Any:
    """Runs what was chosen; compiled once for each choice when called outside of `jax.jit`."""

    def runner(name: str) -> Callable[[dict[str, Any]], Any]:
        function = getattr(_find([name])[0].module, primitive)
        known = inspect.signature(function).parameters
        taken = {hint: value for hint, value in hints if hint in known}
        return lambda arrays: function(**arrays, **dict(static), **taken)

    names = dict.fromkeys(name for _, name in chosen)
    if len(names) == 1:
        return runner(*names)(arrays)
    *_, (_, default) = chosen
    special = {platform: runner(name) for platform, name in chosen if name != default}
    return jax.lax.platform_dependent(arrays, default=runner(default), **special)


def _candidates() -> tuple[Implementation, ...]:
    names = _named.get()
    if names is None and (variable := os.environ.get("JAXREC_KERNELS")):
        names = tuple(name.strip() for name in variable.split(","))
    if names is None:
        return tuple(each for each in IMPLEMENTATIONS if each.by_default)
    return _find(names)


def _find(names: tuple[str, ...] | list[str]) -> tuple[Implementation, ...]:
    known = {each.name: each for each in IMPLEMENTATIONS}
    for name in names:
        if name not in known:
            raise ValueError(
                f"no implementation of the embedding kernels is named {name!r}; there are "
                f"{', '.join(map(repr, known))}"
            )
    return tuple(known[name] for name in names)


def _signature(primitive: str) -> inspect.Signature:
    reference = importlib.import_module("jaxrec.embed.kernels.reference")
    function = getattr(reference, primitive, None) if primitive in PRIMITIVES else None
    if function is None:
        raise ValueError(f"there is no primitive {primitive!r}; there are {', '.join(PRIMITIVES)}")
    return inspect.signature(function)


PRIMITIVES = (
    "new_rows",
    "pooled_lookup",
    "flatten_bags",
    "row_lookup",
    "build_runs",
    "bucket",
    "shift_rows",
    "sum_rows",
    "fused_update",
)
