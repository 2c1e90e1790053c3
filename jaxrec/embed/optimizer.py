"""The optimizer of a model with tables: step 6 of `jaxrec.embed.training_step`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int

from jaxrec.embed.batch_checks import call_back
from jaxrec.embed.gradients import Gradients, rows_are_finite
from jaxrec.embed.taps import tapped_modules
from jaxrec.embed.variables import is_variable, put, update_shardings, without_placements
from jaxrec.optim import RowOptimizer, hyperparameter
from jaxrec.optim.hyperparameters import UpdateStep, find_hyperparameters


class NotFiniteError(ArithmeticError):
    """The loss or a gradient of a step is NaN or infinite."""


class Hyperparameter(nnx.Variable):
    """The value of a `jaxrec.optim.hyperparameter`, a float32 scalar."""


class SkipCount(nnx.Variable):
    """Number of skipped steps, an int32 scalar."""


class Optimizer(nnx.Optimizer):
    """Optimizer of a model with tables: optax for its dense parameters, row optimizers for rows.

    Use it like `nnx.Optimizer`, with the gradients of `jaxrec.value_and_grad`. A step whose loss or
    gradients are not finite is skipped: no parameter, row or state changes, and ``step`` does not
    advance.

    Args:
        model: The model, from whose dense parameters the optax state is made.
        tx: The optax transformation of the dense parameters.
        wrt: Filter of the dense parameters; the same as `jaxrec.value_and_grad`'s.
        debug: Whether compiled steps check ids and gradients on the host, which costs time. An id
            outside its table raises an error with the feature, the sample and the id. A skipped
            step raises an error that names what is not finite.

    Attributes:
        step: Number of updates made, given to learning-rate schedules of tables.
        skipped: Number of steps skipped.
        skipped_in_a_row: Number of steps skipped since the last update.

    Raises:
        TypeError: The model is not an `nnx.Module`, or ``tx`` is not an optax transformation.
        ValueError: ``tx`` accumulates gradients (`optax.MultiSteps`); or two row optimizers have
            hyperparameters of one name and different values.

    Example:
        >>> import jax, jaxrec, optax
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=1)
        >>> model = jaxrec.EmbeddingBagCollection(
        ...     [config], optimizer=jaxrec.optim.sgd(0.5), rngs=nnx.Rngs(0))
        >>> model.load_table("user", jax.numpy.ones((3, 1)))
        >>> optimizer = Optimizer(model, optax.adam(1e-3))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 1], [2]]})
        >>> loss_fn = lambda model: model(batch).values.sum()
        >>> loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        >>> optimizer.update(model, gradients)
        >>> model.table("user")[:, 0].tolist()
        [1.0, 0.0, 0.5]
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        debug: bool = False,
    ):
        _check_arguments(model, tx)
        # Parameters that are sharded on their own (`PlacedVariable`) are gathered at each read,
        # which optax must not do: state is made from the shards, and lies as they do.
        super().__init__(model, _on_arrays(tx), wrt=wrt)
        self.tx = tx
        for variable, sharding in self._update_shardings(model):
            if not sharding.is_fully_replicated:
                variable.set_raw_value(put(variable.get_raw_value(), sharding))
        _check_accumulates_nothing(self.opt_state)
        self.skipped = SkipCount(jnp.zeros((), jnp.int32))
        self.skipped_in_a_row = SkipCount(jnp.zeros((), jnp.int32))
        self._values = nnx.Dict(_initial_hyperparameters(model))
        self.debug = debug
        modules = tapped_modules(model).values()
        for module in modules:
            module.debug = debug
        # Counters are put on the tables' mesh now. A step returns them there, so that with counters
        # on one device the first step and the second would be two programs.
        for module in modules:
            nnx.update(self, module.tables.get_value().devices.put_beside(nnx.state(self)))

    def hyperparameters(self) -> dict[str, float]:
        """Return the values of the row optimizers' hyperparameters by name."""
        return {name: float(variable.get_value()) for name, variable in self._values.items()}

    def set_hyperparameters(self, **values: float | np.floating | Array) -> None:
        """Set hyperparameters of the row optimizers; compiled steps take the new values.

        Args:
            values: The new value of each `jaxrec.optim.hyperparameter` by name, 0 or more.

        Raises:
            KeyError: No row optimizer of the model has a hyperparameter of that name.
            ValueError: A value is not a number of 0 or more.
        """
        for name, value in values.items():
            if name not in self._values:
                raise KeyError(
                    f"no row optimizer has a hyperparameter {name!r}; there are "
                    f"{', '.join(map(repr, self._values)) or 'none'}. Give "
                    f"jaxrec.optim.hyperparameter({name!r}, value) to a row optimizer as its "
                    "learning_rate or weight_decay"
                )
            # Its constructor has the check of values. Traced ones cannot be checked.
            if not isinstance(value, jax.core.Tracer):
                hyperparameter(name, float(value))
            old, new = self._values[name].get_value(), jnp.asarray(value, jnp.float32)
            is_traced = isinstance(old, jax.core.Tracer) or isinstance(new, jax.core.Tracer)
            self._values[name].set_value(new if is_traced else jax.device_put(new, old.sharding))

    def update(  # type: ignore[override]  # takes the gradients of tables along
        self, model: nnx.Module, grads: Gradients, **kwargs: Any
    ) -> None:
        """Update the dense parameters and the rows that were looked up, by one step.

        Args:
            model: The model.
            grads: Its gradients, from `jaxrec.value_and_grad`.
            **kwargs: Passed on to the optax transformation.

        Raises:
            TypeError: If the gradients are not from `jaxrec.value_and_grad`.
            ValueError: If they are of a model with other collections.
        """
        if not isinstance(grads, Gradients):
            raise TypeError(
                "gradients come from jaxrec.value_and_grad, which carries those of the tables; "
                f"got {type(grads).__name__}"
            )
        modules = tapped_modules(model)
        if unknown := set(grads.tables) - set(modules):
            raise ValueError(
                f"gradients of collections at {sorted(unknown)}, but the model has collections "
                f"at {sorted(modules)}; pass the model that was differentiated"
            )
        is_applied = grads.is_finite()
        values = {name: variable.get_value() for name, variable in self._values.items()}
        step = UpdateStep(self.step.get_value().astype(jnp.int32), values)
        if self.debug:
            _report_not_finite(grads, step.count)
        # The barrier keeps XLA from fusing the computation of gradients into each update. Fused,
        # they round otherwise, and programs that differ elsewhere (`RoutedSteps`) would give other
        # bits.
        dense, is_applied = jax.lax.optimization_barrier((grads.dense, is_applied))
        self._update_dense(model, dense, is_applied, **kwargs)
        for path, calls in grads.tables.items():
            modules[path].apply_gradients(calls, step, is_applied)
        is_skipped = (~is_applied).astype(jnp.int32)
        self.skipped.set_value(self.skipped.get_value() + is_skipped)
        # Counts up while steps are skipped, and back to 0 at the first that is not.
        in_a_row = (self.skipped_in_a_row.get_value() + is_skipped) * is_skipped
        self.skipped_in_a_row.set_value(in_a_row)

    def _update_dense(
        self, model: nnx.Module, gradients: nnx.State, is_applied: Bool[Array, ""], **kwargs: Any
    ) -> None:
        """Update the dense parameters, optax's state and the count of steps, unless skipped."""
        # Dense parameters are small beside tables, so the old and the new ones may be held at once.
        variables = _variables((nnx.state(model, self.wrt), self.opt_state, self.step))
        before = [variable.get_raw_value() for variable in variables]
        super().update(model, gradients, **kwargs)
        for variable, old in zip(variables, before, strict=True):
            new = variable.get_raw_value()
            variable.set_raw_value(jax.tree.map(functools.partial(_select, is_applied), new, old))
        # XLA chooses the sharding of a result unless we name one. The next step must find the same
        # sharding, or it compiles again.
        for variable, sharding in self._update_shardings(model):
            variable.set_raw_value(put(variable.get_raw_value(), sharding))

    def _update_shardings(self, model: nnx.Module) -> list[tuple[nnx.Variable, NamedSharding]]:
        """Return parameters and optax's state with their shardings; empty if none is placed."""
        return update_shardings(nnx.state(model, self.wrt), nnx.state(self.opt_state))


def _report_not_finite(gradients: Gradients, step: Int[Array, ""]) -> None:
    """Raise a `NotFiniteError` that names the loss or the gradients that are not finite."""
    is_finite: dict[str, Array] = {"the loss": gradients.loss_is_finite.open()}
    for keys, leaf in jax.tree.leaves_with_path(gradients.dense):
        is_finite[f"the gradient of parameter {_path_name(keys)}"] = jnp.isfinite(leaf).all()
    for path, calls in gradients.tables.items():
        for call in calls:
            for name, rows in call.items():
                group = gradients.stores[path].groups[name]
                # Two messages for one gradient: it is not finite, or its square is not.
                where = f"the gradient of the embeddings of {path or 'the model'}, group {name}"
                optimizer, has_numbers = group.optimizer, jnp.isfinite(rows.values).all()
                too_large = (
                    f"{where} (beyond {optimizer.largest_gradient:.0e}, too large for the squares "
                    f"that {type(optimizer).__name__} keeps in float32)"
                )
                for what, finite in (
                    (where, has_numbers),
                    (too_large, ~has_numbers | rows_are_finite(rows, group)),
                ):
                    is_finite[what] = is_finite[what] & finite if what in is_finite else finite
    call_back(functools.partial(_raise_not_finite, tuple(is_finite)), step, *is_finite.values())


def _raise_not_finite(names: tuple[str, ...], step: Any, *is_finite: Any) -> None:
    wrong = [name for name, finite in zip(names, is_finite, strict=True) if not finite]
    if wrong:
        raise NotFiniteError(
            f"the step after update {int(step)} is skipped: not finite are {', '.join(wrong)}"
        )


def _path_name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def _on_arrays(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return ``tx`` with an ``init`` that sees variables placed on a mesh as sharded arrays."""
    return optax.GradientTransformation(lambda state: tx.init(without_placements(state)), tx.update)


def _check_arguments(model: nnx.Module, tx: optax.GradientTransformation) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"an Optimizer is made for a flax.nnx.Module, got {type(model).__name__}")
    is_optax = callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    if isinstance(tx, RowOptimizer) or not is_optax:
        raise TypeError(
            f"tx is an optax transformation for the dense parameters such as optax.adam(1e-3), got "
            f"{tx!r}. Row optimizers are for tables: EmbeddingBagCollection(..., optimizer=...)"
        )


def _check_accumulates_nothing(opt_state: Any) -> None:
    # `optax.MultiSteps` may be anywhere in a chain, so we look for its state and not at `tx`
    # itself.
    def is_accumulator(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState)

    if any(map(is_accumulator, jax.tree.leaves(opt_state, is_leaf=is_accumulator))):
        raise ValueError(
            "optax.MultiSteps accumulates the gradients of the dense parameters alone, while the "
            "tables would move at every step. Accumulate with jaxrec.mean_gradients([...]) before "
            "Optimizer.update, or with jaxrec.train.Trainer(accumulate=...)"
        )


def _initial_hyperparameters(model: nnx.Module) -> dict[str, Hyperparameter]:
    """Return the hyperparameters of a model's row optimizers by name, with their first values."""
    values: dict[str, float] = {}
    stores = [module.tables.get_value() for module in tapped_modules(model).values()]
    groups = [group for store in stores for group in store.groups.values()]
    for each in (found for group in groups for found in find_hyperparameters(group.optimizer)):
        if values.setdefault(each.name, each.value) != each.value:
            raise ValueError(
                f"two row optimizers have a hyperparameter {each.name!r} with different values, "
                f"{values[each.name]} and {each.value}; give them one value or two names"
            )
    return {name: Hyperparameter(jnp.asarray(v, jnp.float32)) for name, v in values.items()}


def _variables(tree: Any) -> list[nnx.Variable]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(leaf)]


def _select(condition: Bool[Array, ""], new: Array, old: Array) -> Array:
    """Return ``new`` if the condition holds, else ``old``."""
    # A variable that the update did not touch needs no choice in the program.
    return new if new is old else jnp.where(condition, new, old)
