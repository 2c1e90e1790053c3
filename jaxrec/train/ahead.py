"""Training steps over a mesh that route the next batch."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxrec.data.pipeline import each_batch
from jaxrec.embed.taps import Ahead
from jaxrec.mesh.agree import on_host
from jaxrec.mesh.ahead import route_ahead, use_ahead
from jaxrec.mesh.capacity import Capacities, GroupPath, measure_demand
from jaxrec.train.routed_calls import MAX_UNREAD
from jaxrec.train.step import check_step, compile_step


class RoutedSteps:
    """Training steps over a mesh, each of which also routes the next batch.

    The program of a step sends the ids of the next batch to the owners of their rows, so that the
    compiler can overlap this exchange with the computation. (TorchRec's
    ``TrainPipelineSparseDist``.) The measured demand of the batches chooses the capacities of
    the exchange (`jaxrec.mesh.capacity`). Results are the same bits as without routing ahead. On
    one device there is no routing, and the steps are those of `jaxrec.train.compile_step`.

    Args:
        step: Function ``step(*modules, batch)``, as for `jaxrec.train.compile_step`.
        forward: Function ``forward(model, batch)`` that makes all lookups of ``step``, in the same
            order.
        *modules: The model, its optimizer and all other modules that ``step`` changes. Their arrays
            are donated.

    Raises:
        TypeError: An argument has another type.

    Example:
        >>> import jax.numpy as jnp, jaxrec, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> def train_step(model, optimizer, x):
        ...     loss, gradients = jaxrec.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        ...     optimizer.update(model, gradients)
        ...     return loss
        >>> steps = RoutedSteps(train_step, lambda model, x: model(x), model, optimizer)
        >>> losses = [float(loss) for _, loss in steps([jnp.ones((1, 1))] * 20)]
        >>> losses[-1] < 0.1 * losses[0]
        True
    """

    def __init__(
        self, step: Callable[..., Any], forward: Callable[[Any, Any], Any], *modules: Any
    ) -> None:
        check_step(step, modules)
        if not callable(forward) or isinstance(forward, nnx.Pytree):
            raise TypeError(
                "forward must be a function forward(model, batch), such as lambda model, batch: "
                f"model(batch), got a {type(forward).__name__}"
            )
        if not isinstance(modules[0], nnx.Module) or isinstance(modules[0], nnx.Optimizer):
            raise TypeError(
                f"the first module must be the model, got a {type(modules[0]).__name__}"
            )
        self._step, self._forward = step, forward
        self._model = modules[0]
        self._ahead: nnx.Variable[Any] = nnx.Variable(None)
        self._capacities = Capacities(self._model)
        self._alone = compile_step(step, *modules)
        self._routed = compile_step(self._step_and_route, *modules, self._ahead)
        self._route_now = jax.jit(
            lambda graph, state, batch: self._route_in_step(nnx.merge(graph, state), batch),
            static_argnums=0,
        )

    def __call__(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Dispatch a step for each batch.

        Args:
            batches: Batches on the devices. The iterator is one batch ahead of the steps.

        Yields:
            Each batch and the result of its step, which the devices may still compute.

        Raises:
            TypeError: ``batches`` is a single batch.
        """
        batches = each_batch(batches)
        batch = next(batches, None)
        if batch is None:
            return
        self._route(batch)
        if not jax.tree.leaves(self._ahead.get_value()):
            for each in itertools.chain((batch,), batches):
                yield each, self._alone(each)
            return
        unread: collections.deque[Any] = collections.deque()
        for following in itertools.chain(batches, (None,)):
            # The last step routes its own batch again, and so does one before a batch of another
            # shape: a program for each pair of shapes would compile too often.
            is_alike = following is not None and _shape(following) == _shape(batch)
            result, demand = self._routed(batch, following if is_alike else batch)
            yield batch, result
            if following is None:
                return
            batch = following
            if not is_alike:
                self._route(batch)
            unread.append(demand)
            if len(unread) > MAX_UNREAD and self._capacities.observe(
                jax.tree.map(on_host, unread.popleft())
            ):
                self._route(batch)

    def _route(self, batch: Any) -> None:
        """Route a batch outside of a step."""
        graph, state = nnx.split(self._model)
        self._ahead.set_value(self._route_now(graph, state, batch))

    def _step_and_route(self, *args: Any) -> tuple[Any, dict[GroupPath, Array]]:
        *modules, ahead, batch, following = args
        model = modules[0]
        with use_ahead(model, ahead.get_value()):
            result = self._step(*modules, batch)
        routes = self._route_in_step(model, following)
        ahead.set_value(routes)
        return result, measure_demand(routes)

    def _route_in_step(self, model: nnx.Module, batch: Any) -> dict[str, list[Ahead]]:
        return route_ahead(lambda model: self._forward(model, batch), model)


def _shape(batch: Any) -> tuple[Any, list[Any]]:
    """Return the structure of a batch and the shapes and types of its arrays."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, list(map(jax.typeof, leaves))
