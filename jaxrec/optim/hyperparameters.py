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
    """A number that is set by name between steps, as a learning rate or a weight decay.

    `jaxrec.Optimizer` holds the values of all hyperparameters of its model's row optimizers, saves
    them in checkpoints, and passes them to the compiled step as arguments. optax has
    `optax.inject_hyperparams` for the dense part. Other fields of a row optimizer, such as ``eps``,
    are fixed when the step is compiled.

    Attributes:
        name: The name it is set by. Row optimizers that use one name share one value.
        value: The value that it has until it is set, 0 or more.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is empty, or the value is not a number of 0 or more.

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
        """Return the first value, so that the hyperparameter serves as a schedule."""
        return jnp.asarray(self.value, jnp.float32)

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
    """The number of an update with the hyperparameters that it uses.

    Attributes:
        count: Number of updates made before, 0 at the first.
        values: The value of each `hyperparameter` by name; others keep the one they have.
    """

    count: Int[Array, ""]
    values: dict[str, Float[Array, ""]]


Step: TypeAlias = UpdateStep | Int[Array, ""]


def as_step(step: Any) -> Step:
    """Return a step with its number as int32."""
    # Values of hyperparameters travel with the number of the step, so that everything that takes a
    # step, down to the kernels, takes them without knowing of them.
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
    """Return a row optimizer with the values of a step, and the number of the step."""
    values, count = (step.values, step.count) if isinstance(step, UpdateStep) else ({}, step)

    def set_value(_: str, value: Any) -> Any:
        if not isinstance(value, hyperparameter):
            return value
        return values.get(value.name, jnp.asarray(value.value, jnp.float32))

    return _replace_fields(optimizer, set_value), count


def numbers_of_step(optimizer: Any, count: Int[Array, ""]) -> list[Float[Array, ""]]:
    """Return the learning rates and hyperparameters of a row optimizer that `resolve` returned."""
    numbers: list[Float[Array, ""]] = []

    def collect(name: str, value: Any) -> Any:
        if _is_number_of_step(name, value):
            number = value(count) if callable(value) else value
            numbers.append(jnp.asarray(number, jnp.float32))
        return value

    _replace_fields(optimizer, collect)
    return numbers


def with_numbers(optimizer: Any, numbers: Iterable[Float[Array, ""] | float]) -> Any:
    """Return a row optimizer with what `numbers_of_step` returned, or other values, in its place.

    A kernel of its own memory cannot close over arrays, nor trace any schedule: it loads these.
    """
    following = iter(numbers)

    def put(name: str, value: Any) -> Any:
        return next(following) if _is_number_of_step(name, value) else value

    return _replace_fields(optimizer, put)


def _is_number_of_step(name: str, value: Any) -> bool:
    return name == "learning_rate" or callable(value) or isinstance(value, jax.Array)


def _replace_fields(optimizer: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a row optimizer whose fields, and those of the optimizers that it wraps, are changed.

    Args:
        optimizer: The row optimizer.
        change: ``change(name, value)`` returns the value that a field is to have.
    """
    changed = {}
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        is_optimizer = dataclasses.is_dataclass(value) and hasattr(value, "update")
        new = _replace_fields(value, change) if is_optimizer else change(field.name, value)
        if new is not value:
            changed[field.name] = new
    if not changed:
        return optimizer
    bound = copy.copy(optimizer)
    for name, value in changed.items():
        object.__setattr__(bound, name, value)  # the checks of __post_init__ refuse arrays
    return bound
