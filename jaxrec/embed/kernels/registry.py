"""The registry of implementations, and the choice of the one that runs a call.

`IMPLEMENTATIONS` lists them in order of preference, and for each platform the first one that takes
a call runs it. `describe` tells which one was chosen and why.

**A new implementation** is a module or a folder beside this file, and a line in `IMPLEMENTATIONS`
with its name, its platforms and whether it must pass a trial. The module has

* a function for each primitive that it implements, with the name and the arguments of the function
  in `reference`; hints may be missing;
* ``refuse(primitive, arguments) -> str | None``, the reason why it does not take a call, in words
  that `jaxrec doctor` prints;
* ``OPTIONS``, if it has any: by primitive, keyword arguments that change the speed alone, with the
  values that `jaxrec tune` tries.

**A new primitive** is a function in `reference`, and a line in
``jaxrec/embed/kernels/__init__.py``. If its implementations are tried or timed, `trial` gets its
form and an example.
"""

# Three things change the order of preference:
#
# 1. Names that the user gave: `use_kernels`, or the environment variable JAXREC_KERNELS.
# 2. A choice of `jaxrec tune` for calls like this one.
# 3. A trial: a kernel for GPUs or TPUs that fails on the card at hand refuses the calls of that
#    form.
#
# `answers` keeps 2 and 3 in a file of the user's cache directory.
#
# Implementations know nothing of the registry: a contract in pyproject.toml, which names each of
# them, checks that. The registry imports them by name when they are first asked, since Pallas takes
# long to import and most processes have no GPU.

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from jaxrec.embed.kernels import trial
from jaxrec.embed.kernels.answers import Trials, TunedCall, kept_for
from jaxrec.embed.kernels.trial import Form

P = ParamSpec("P")
R = TypeVar("R")

FAILED = "on this "  # begins the reason of a trial that failed
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
TUNED_PLATFORMS = ("cpu", "cuda")
PRIMITIVES: dict[str, Primitive] = {}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A module that implements some of the primitives."""

    name: str  # in `use_kernels`; also the module's name
    platforms: tuple[str, ...]
    # Whether it must pass a trial on the card at hand, unless the user names it.
    is_tried: bool = False

    @property
    def is_for_tpus(self) -> bool:
        return self.platforms == ("tpu",)

    @property
    def module(self) -> Any:
        return importlib.import_module(f"jaxrec.embed.kernels.{self.name}")

    def options(self, primitive: str) -> Mapping[str, tuple[int, ...]]:
        """Return the options of a primitive that `jaxrec tune` may choose, with their values."""
        return getattr(self.module, "OPTIONS", {}).get(primitive, {})

    def refuse(self, primitive: str, arguments: Mapping[str, Any], *, is_named: bool) -> str | None:
        """Return why the implementation does not take a call; None: it does.

        ``is_named``: the user named the implementation, so that it needs no trial.
        """
        trials = None
        try:
            if self.is_tried and not is_named and (trials := _trials(self)) is None:
                return (
                    f"there is no {'TPU' if self.is_for_tpus else 'NVIDIA GPU'} here to try it on"
                )
            module = self.module
        except ImportError as error:  # Pallas' backends for GPUs come and go.
            return f"JAX {jax.__version__} has no such backend: {error}"
        if not hasattr(module, primitive):
            return f"it has no {primitive}"
        # A trial takes seconds, so it comes last: calls that are refused anyway are not tried.
        reason = module.refuse(primitive, arguments)
        if reason is not None or trials is None:
            return reason
        failure = trials.failure(Form.of(primitive, arguments))
        return None if failure is None else f"{FAILED}{trials.card.device_kind} {failure}"

    def follows(self, call: TunedCall, primitive: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether this implementation takes a call with the options of a recorded choice."""
        if self.refuse(primitive, arguments, is_named=False) is not None:
            return False
        values = self.options(primitive)
        return all(value in values.get(name, ()) for name, value in call.options.items())


IMPLEMENTATIONS = (
    Implementation("cpu", ("cpu",)),
    Implementation("triton", ("cuda",), is_tried=True),
    # The backend that JAX keeps; behind Triton's until both were timed on one card.
    Implementation("mosaic", ("cuda",), is_tried=True),
    Implementation("sparse_core", ("tpu",), is_tried=True),
    Implementation("reference", PLATFORMS),
)


@functools.cache
def _trials(implementation: Implementation) -> Trials | None:
    """Return the object that tries an implementation's kernels on a card; None without a card."""
    cards = trial.tpus() if implementation.is_for_tpus else trial.cards()
    return Trials(implementation.name, implementation.module, cards[0]) if cards else None


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementations that run a call, by platform; `str` prints them with reasons."""

    primitive: str
    chosen: Mapping[str, str]  # platform: implementation
    refused: Mapping[str, str]  # implementation: the reason why it was passed over
    # Choices of `jaxrec tune` that were followed, by platform.
    tuned: Mapping[str, TunedCall] = dataclasses.field(default_factory=dict)

    def options(self, platform: str) -> Mapping[str, int]:
        """Return the options with which the call runs on a platform."""
        return self.tuned[platform].options if platform in self.tuned else {}

    def __str__(self) -> str:
        platforms: dict[str, list[str]] = {}
        for platform in self.chosen:
            platforms.setdefault(self.name(platform), []).append(platform)
        lines = [f"{self.primitive}:"]
        lines += [f"  {name} on {', '.join(names)}" for name, names in platforms.items()]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)

    def name(self, platform: str) -> str:
        """Return a platform's implementation, as in ``"triton (warps 2, by jaxrec tune)"``."""
        options = "".join(f"{each} {value}, " for each, value in self.options(platform).items())
        tuned = f" ({options}by jaxrec tune)" if platform in self.tuned else ""
        return f"{self.chosen.get(platform, 'none')}{tuned}"


class Primitive(Generic[P, R]):
    """A function on arrays with several implementations; a call runs the one chosen for it.

    ``reference`` defines it and gives its name and signature. Keyword-only parameters are hints,
    those in ``static`` are hashable, and the others are pytrees of arrays.
    """

    def __init__(self, reference: Callable[P, R], static: tuple[str, ...] = ()):
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.signature = inspect.signature(reference)
        parameters = self.signature.parameters.values()
        self.static = static
        self.hints = tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
        PRIMITIVES[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments = self.bind(*args, **kwargs)
        choice = self.choose(arguments)
        if "cpu" in choice.refused:
            _warn_if_missing()
        # All as hashable tuples: `_program` is cached by them, so that outside of `jax.jit` a call
        # compiles once for each choice, shape and static argument.
        chosen = tuple(
            (platform, (name, tuple(choice.options(platform).items())))
            for platform, name in choice.chosen.items()
        )
        static = tuple((name, arguments.pop(name)) for name in self.static)
        hints = tuple((name, arguments.pop(name)) for name in self.hints)
        return _program(self.name, chosen, static, hints)(arguments)

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by name, defaults included."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def choose(self, arguments: Mapping[str, Any], *, is_tuned: bool = True) -> Choice:
        """Return the implementations that run a call; ``is_tuned`` follows `jaxrec tune`."""
        chosen: dict[str, str] = {}
        refused: dict[str, str] = {}
        named = _named_implementations()
        # `jaxrec tune` times no calls whose arrays are in parts, as simulated devices have them.
        is_tuned &= named is None and all(arguments.get(hint, 1) == 1 for hint in self.hints)
        tuned = _tuned(self.name, arguments) if is_tuned else {}
        chosen.update({platform: call.implementation for platform, call in tuned.items()})
        for implementation in IMPLEMENTATIONS if named is None else named:
            names = {chosen.get(platform) for platform in implementation.platforms}
            if named is None and implementation.is_tried and None not in names:
                # It is not tried in vain.
                refused[implementation.name] = f"{' and '.join(map(str, names))} runs the call"
                continue
            reason = implementation.refuse(self.name, arguments, is_named=named is not None)
            if reason is not None:
                refused[implementation.name] = reason
                continue
            # The first that takes the call wins, unless `jaxrec tune` chose before.
            for platform in implementation.platforms:
                chosen.setdefault(platform, implementation.name)
        if not chosen:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise ValueError(
                f"no implementation named by use_kernels or JAXREC_KERNELS takes this {self.name}: "
                f"{reasons}. Name one that does after them, such as 'reference'"
            )
        in_order = {platform: chosen[platform] for platform in PLATFORMS if platform in chosen}
        return Choice(self.name, in_order, refused, tuned)


_named: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "jaxrec_kernels", default=None
)


@contextlib.contextmanager
def use_kernels(*names: str) -> Iterator[None]:
    """Run the primitives by the named implementations, in this order of preference.

    The environment variable JAXREC_KERNELS does the same for a whole process, its names separated
    by commas. Functions that were compiled before keep their implementations.

    Args:
        names: Names of implementations, such as "reference".

    Raises:
        ValueError: There is no implementation of such a name. The call of a primitive raises it
            where no named implementation takes the call.

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
    """Return which implementations would run a call of a primitive, and why.

    Args:
        primitive: Name of the primitive, such as "pooled_lookup".
        *args: Its arguments by position. Arrays may be `jax.ShapeDtypeStruct`.
        **kwargs: Its arguments by name.

    Raises:
        ValueError: There is no such primitive, or no implementation takes the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> rows = jax.ShapeDtypeStruct((3,), jnp.int32)
        >>> with kernels.use_kernels("reference"):
        ...     print(kernels.describe("build_runs", rows, 4))
        build_runs:
          reference on cpu, cuda, rocm, tpu
    """
    if primitive not in PRIMITIVES:
        raise ValueError(f"there is no primitive {primitive!r}; there are {', '.join(PRIMITIVES)}")
    definition = PRIMITIVES[primitive]
    return definition.choose(definition.bind(*args, **kwargs))


@functools.cache
def _warn_if_missing() -> None:
    """Warn once if this process computes on CPUs without the native library."""
    reason = _find(["cpu"])[0].module.missing()
    if reason is not None and jax.default_backend() == "cpu":
        warnings.warn(
            f"lookups and updates of tables run in XLA, up to twenty times slower: {reason}. "
            "JAXREC_KERNELS=reference chooses XLA without this warning",
            RuntimeWarning,
            stacklevel=3,
        )


@functools.lru_cache(maxsize=4096)
def _program(
    primitive: str,
    chosen: tuple[tuple[str, tuple[str, tuple[tuple[str, int], ...]]], ...],
    static: tuple[tuple[str, Any], ...],
    hints: tuple[tuple[str, Any], ...],
) -> Callable[[dict[str, Any]], Any]:
    """Return the chosen implementations as one compiled function of the arrays by name."""

    def implementation(
        name: str, options: tuple[tuple[str, int], ...]
    ) -> Callable[[dict[str, Any]], Any]:
        function = getattr(_find([name])[0].module, primitive)
        parameters = inspect.signature(function).parameters
        known_hints = {hint: value for hint, value in hints if hint in parameters}
        keywords = dict(static) | known_hints | dict(options)
        return lambda arrays: function(**arrays, **keywords)

    functions = {choice: implementation(*choice) for _, choice in chosen}
    if len(functions) == 1:
        return jax.jit(*functions.values(), inline=True)
    # The platform is known when the program is lowered, not when it is traced: `jax.export` lowers
    # for several.
    *_, (_, default) = chosen
    special = {platform: functions[choice] for platform, choice in chosen if choice != default}
    by_platform = functools.partial(
        jax.lax.platform_dependent, default=functions[default], **special
    )
    return jax.jit(by_platform, inline=True)


def _tuned(primitive: str, arguments: Mapping[str, Any]) -> dict[str, TunedCall]:
    """Return the choices of `jaxrec tune` for a call, by platform, that can still be followed."""
    calls = {}
    for platform in TUNED_PLATFORMS:
        answers = kept_for(platform)
        if answers is None or (call := answers.find(primitive, arguments)) is None:
            continue
        for each in IMPLEMENTATIONS:
            is_chosen = each.name == call.implementation and platform in each.platforms
            if is_chosen and each.follows(call, primitive, arguments):
                calls[platform] = call
    return calls


def _named_implementations() -> tuple[Implementation, ...] | None:
    """Return the implementations that the user named; None: the user named none."""
    names = _named.get()
    if names is None and (variable := os.environ.get("JAXREC_KERNELS")):
        names = tuple(name.strip() for name in variable.split(","))
    return None if names is None else _find(names)


def _find(names: Sequence[str]) -> tuple[Implementation, ...]:
    by_name = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
    for name in names:
        if name not in by_name:
            raise ValueError(
                f"no implementation of the embedding kernels is named {name!r}; there are "
                f"{', '.join(map(repr, by_name))}"
            )
    return tuple(by_name[name] for name in names)
