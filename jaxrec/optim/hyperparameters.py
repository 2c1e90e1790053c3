"""Hyperparameters that change between steps without a new compilation."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim import checks


@dataclasses.dataclass(frozen=True)
class hyperparameter:
    """A number that is set by name between steps, such as a learning rate or a weight decay.

    `jaxrec.Optimizer` holds the values of all hyperparameters of its model's row optimizers, saves
    them in checkpoints, and passes them to the compiled step as arguments. For the dense part optax
    has `optax.inject_hyperparams`. Other fields of a row optimizer, such as ``eps``, are fixed when
    the step is compiled.

    Attributes:
        name: Name to set it by. Row optimizers that use the same name share one value.
        value: Value until it is set, 0 or more.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is not a Python identifier, or the value is not a number of 0 or more.

    Example:
        >>> import jaxrec, optax
        >>> from flax import nnx
        >>> rate = jaxrec.optim.hyperparameter("rate", 0.5)
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=1)
        >>> model = jaxrec.EmbeddingBagCollection(
        ...     [config], optimizer=jaxrec.optim.sgd(learning_rate=rate), rngs=nnx.Rngs(0))
        >>> optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> optimizer.set_hyperparameters(rate=0.25)
        >>> optimizer.hyperparameters()
        {'rate': 0.25}
    """

    name: str
    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"hyperparameter: name is a string, got {self.name!r}")
        if not self.name.isidentifier():
            raise ValueError(f"hyperparameter: name is a Python identifier, got {self.name!r}")
        checks.non_negative(self, "value")

    def __call__(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """Return the first value, as a schedule does."""
        return jnp.asarray(self.value, jnp.float32)

    # With these an optimizer that is called directly, as in examples and tests, multiplies by the
    # first value. Stores call `resolve` before.
    def __mul__(self, other: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.value * other

    __rmul__ = __mul__


def check_weight_decay(owner: Any) -> None:
    """Require the field ``weight_decay`` to be a number of 0 or more, or a `hyperparameter`."""
    if not isinstance(owner.weight_decay, hyperparameter):
        checks.non_negative(owner, "weight_decay")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdateStep:
    """Number of an update, from 0, and the value of each hyperparameter in it, by name."""

    count: Int[Array, ""]
    values: dict[str, Float[Array, ""]]


Step: TypeAlias = UpdateStep | Int[Array, ""]


def as_step(step: Any) -> Step:
    """Convert the number of a step to int32; ``step`` is that number, or an `UpdateStep`."""
    # Values of hyperparameters travel with the step number. So functions that pass a step on, down
    # to the kernels, need no argument for them.
    if isinstance(step, UpdateStep):
        return dataclasses.replace(step, count=jnp.asarray(step.count, jnp.int32))
    return jnp.asarray(step, jnp.int32)


def find_hyperparameters(optimizer: Any) -> Iterator[hyperparameter]:
    """Yield the hyperparameters of a row optimizer and of the optimizers that it wraps."""
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        if isinstance(value, hyperparameter):
            yield value
        elif dataclasses.is_dataclass(value) and hasattr(value, "update"):
            yield from find_hyperparameters(value)


def resolve(optimizer: Any, step: Step) -> tuple[Any, Int[Array, ""]]:
    """Return a row optimizer with a step's hyperparameters as numbers, and the step's number."""
    values, count = (step.values, step.count) if isinstance(step, UpdateStep) else ({}, step)

    def set_value(_: str, value: Any) -> Any:
        if not isinstance(value, hyperparameter):
            return value
        return values.get(value.name, jnp.asarray(value.value, jnp.float32))

    return _replace_fields(optimizer, set_value), count


def numbers_of_step(optimizer: Any, count: Int[Array, ""]) -> list[Float[Array, ""]]:
    """Return the numbers of a row optimizer that change from step to step, for update ``count``.

    They are learning rates and hyperparameters; the optimizer is a result of `resolve`.
    """
    numbers: list[Float[Array, ""]] = []

    def collect(name: str, value: Any) -> Any:
        if _is_number_of_step(name, value):
            number = value(count) if callable(value) else value
            numbers.append(jnp.asarray(number, jnp.float32))
        return value

    _replace_fields(optimizer, collect)
    return numbers


def with_numbers(optimizer: Any, numbers: Iterable[Float[Array, ""] | float]) -> Any:
    """Return a row optimizer with other numbers in the fields that `numbers_of_step` lists."""
    # A Pallas kernel cannot close over arrays, nor trace any schedule. It loads the numbers from an
    # array and puts them in here.
    following = iter(numbers)

    def put(name: str, value: Any) -> Any:
        return next(following) if _is_number_of_step(name, value) else value

    return _replace_fields(optimizer, put)


def _is_number_of_step(name: str, value: Any) -> bool:
    return name == "learning_rate" or callable(value) or isinstance(value, jax.Array)


def _replace_fields(optimizer: Any, change: Callable[[str, Any], Any]) -> Any:
    """Replace each field of a row optimizer, and of those it wraps, by ``change(name, value)``."""
    changed = {}
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        is_optimizer = dataclasses.is_dataclass(value) and hasattr(value, "update")
        new = _replace_fields(value, change) if is_optimizer else change(field.name, value)
        if new is not value:
            changed[field.name] = new
    if not changed:
        return optimizer
    # Not `dataclasses.replace`: it runs the checks of `__post_init__`, which refuse arrays.
    bound = copy.copy(optimizer)
    for name, value in changed.items():
        object.__setattr__(bound, name, value)
    return bound
