"""Compiled training steps without the overhead of `nnx.jit` on each call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxrec.mesh.call_checks import batch_facts, check_call, table_facts

# Number of dispatched steps after which a loop waits for the result of the oldest.
# Two keep the devices busy; more would hold the batches of more steps in memory.
MAX_PENDING_STEPS = 2


def compile_step(step: Callable[..., Any], *modules: Any) -> CompiledStep:
    """Compile a training step for its model and optimizer.

    The compiled step equals ``nnx.jit(step, donate_argnums=...)`` with all modules donated. But
    `nnx.jit` splits and merges the modules on each call, which takes tens of microseconds per
    variable; the compiled step only reads and writes the variables' values. Between calls the
    modules are up to date and can be used as usual: to predict, to save, to load a table.

    Args:
        step: Function ``step(*modules, *batch)``, as for `nnx.jit`. It may change the variables of
            the modules, and returns arrays.
        *modules: Model, optimizer and all other modules that the step changes, such as random
            streams: anything that NNX can split. Their arrays are donated to each call.

    Returns:
        Function of the batch.

    Raises:
        ValueError: ``step`` adds variables to the modules or removes some; raised by the first
            call.
        TypeError: ``step`` is not a function; no module is given; or a module has an array outside
            of its `nnx.Variable` attributes.

    Example:
        >>> import jax.numpy as jnp, jaxrec, optax
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> def train_step(model, optimizer, x, y):
        ...     loss_fn = lambda model: ((model(x) - y) ** 2).mean()
        ...     loss, grads = jaxrec.value_and_grad(loss_fn)(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> compiled = compile_step(train_step, model, optimizer)
        >>> losses = [float(compiled(jnp.ones((1, 1)), jnp.zeros((1, 1)))) for _ in range(20)]
        >>> losses[-1] < 0.1 * losses[0], int(optimizer.step[...])
        (True, 20)
    """
    return CompiledStep(step, modules)


class CompiledStep:
    """A step that `compile_step` returns; call it with a batch."""

    def __init__(self, step: Callable[..., Any], modules: tuple[Any, ...]):
        check_step(step, modules)
        self._step = step
        self._modules = modules
        self._graph: Any = None
        self._compiled: jax.stages.Wrapped
        self._variables: list[nnx.Variable]
        self._take_apart()

    def __call__(self, *batch: Any) -> Any:
        """Run the step; return the result of the step function."""
        self._follow_changes()
        check_call(
            "steps",
            f"step {getattr(self._step, '__name__', type(self._step).__name__)}",
            lambda: table_facts(self._modules[0]) | batch_facts(batch),
        )
        values = [variable.get_raw_value() for variable in self._variables]
        values, result = self._compiled(values, *batch)
        for variable, value in zip(self._variables, values, strict=True):
            # The compiled step has checked that the call is not within a trace.
            variable.set_raw_value(value, _unsafe_bypass_check=True)
        return result

    def lower(self, *batch: Any) -> jax.stages.Lowered:
        """Lower the step for a batch, to inspect its program."""
        values = [variable.get_raw_value() for variable in self._variables]
        return self._compiled.lower(values, *batch)

    @property
    def model_variables(self) -> list[nnx.Variable]:
        """Variables of the first module."""
        self._follow_changes()
        return self._variables[: self._num_of_model]

    def _follow_changes(self) -> None:
        # A user may have replaced a variable or a layer between calls. Comparing identities is far
        # cheaper than splitting the modules again.
        if not _identical(_contents(self._nodes), self._seen):
            self._take_apart()

    def _take_apart(self) -> None:
        graph, state = nnx.split(self._modules)
        self._variables = _variables(state)
        # Variables come in the order of the modules; one that modules share, with the first.
        self._num_of_model = len(_variables(nnx.state(self._modules[0])))
        self._nodes = [node for _, node in nnx.iter_graph(self._modules) if _can_change(node)]
        self._seen = _contents(self._nodes)
        # New variables alone need no new program; a static attribute or a layer that changed does.
        if graph != self._graph:
            self._graph = graph
            self._compiled = jax.jit(_pure(self._step, graph, state), donate_argnums=0)


class CompiledCall:
    """A compiled ``function(model, *arrays)`` that leaves the model as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._graph: Any = None
        self._compiled: Callable[..., Any]

    def __call__(self, model: nnx.Module, *arrays: Any) -> Any:
        graph, state = nnx.split(model)
        # A graph cannot be a static argument: it has no hash if a module has an attribute without,
        # such as a dict.
        if graph != self._graph:
            self._graph = graph
            self._compiled = jax.jit(
                lambda state, *arrays: self._function(nnx.merge(graph, state), *arrays)
            )
        return self._compiled(state, *arrays)


def check_step(step: Any, modules: tuple[Any, ...]) -> None:
    """Raise a TypeError unless ``step`` is a function and the modules can be split."""
    if not callable(step) or isinstance(step, nnx.Pytree):
        raise TypeError(
            "the step must be a function step(*modules, *batch), followed by its modules, got "
            f"a {type(step).__name__}"
        )
    for module in modules:
        if not isinstance(module, nnx.Pytree | nnx.Variable | jax.Array | list | dict | tuple):
            raise TypeError(
                "a step keeps what it changes in modules, such as the model and jaxrec.Optimizer, "
                f"got {module!r}"
            )
    if not modules:
        raise TypeError(
            "a step needs its modules, compile_step(step, model, optimizer): changes to modules "
            "that come with the batch would be lost"
        )


def _pure(step: Callable[..., Any], graph: Any, template: Any) -> Callable[..., Any]:
    """Return ``step`` as a pure function from values and batch to new values and the result."""
    paths = _paths(template)

    def pure(values: list[Any], *batch: Any) -> tuple[list[Any], Any]:
        remaining = iter(values)
        state = jax.tree.map(
            lambda variable: variable.replace(next(remaining)), template, is_leaf=_is_variable
        )
        modules = nnx.merge(graph, state)
        result = step(*modules, *batch)
        graph_after, state = nnx.split(modules)
        # This runs while the step is traced, once for each shape of a batch.
        if (paths_after := _paths(state)) != paths or graph_after != graph:
            changed = sorted(set(paths_after) ^ set(paths)) or "attributes that are not variables"
            raise ValueError(
                f"the step changed the structure of its modules: {changed}. A compiled step may "
                "change the values of variables only; create variables before compiling, and make "
                "other changes (train(), eval(), a new layer) outside of the step"
            )
        return [variable.get_raw_value() for variable in _variables(state)], result

    return pure


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _variables(state: Any) -> list[nnx.Variable]:
    variables = jax.tree.leaves(state, is_leaf=_is_variable)
    if bare := [leaf for leaf in variables if not _is_variable(leaf)]:
        raise TypeError(
            f"a compiled step keeps its arrays in nnx.Variables, but its modules hold {len(bare)} "
            f"bare arrays, the first {jax.typeof(bare[0])}; wrap them in nnx.Variable"
        )
    return variables


def _paths(state: Any) -> list[str]:
    return ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def _can_change(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | list | dict)


def _contents(nodes: list[Any]) -> list[Any]:
    """Return all attributes and items of the nodes of a graph."""
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, list):
            values.extend(node)
        else:
            values.extend((node if isinstance(node, dict) else vars(node)).values())
    return values


def _identical(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))
