"""Steps that do a part of the next one: they find out ahead what its batch needs."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.taps import Ahead, route_ahead, use_ahead
from jaxrec.mesh.agree import on_host
from jaxrec.mesh.rooms import Group, Rooms, measured_loads
from jaxrec.train.held import Held
from jaxrec.train.pipeline import each_batch
from jaxrec.train.step import check_step, compile_step

# Steps whose needs are not waited for.
_UNREAD = 2


class RoutedSteps:
    """Steps over a mesh: while one computes, the batch of the next is routed between devices.

    Each step sends the ids of the batch after its own to the owners of their rows, in one program
    with the rest of it, so that the compiler can have both under way at once. (TorchRec's
    ``TrainPipelineSparseDist``.) What it finds also says how much room the exchange needs, see
    `jaxrec.mesh.rooms`. Results are those of steps one by one, to the bit. On one device there is
    nothing to route, and these are the steps of `jaxrec.train.compile_step`.

    Args:
        step: ``step(*modules, batch)``, as `jaxrec.train.compile_step` takes it.
        forward: ``forward(model, batch)`` calls the model with all that it looks up for a batch: as
            ``step`` does, in that order.
        *modules: The model, its optimizer and whatever else ``step`` changes; they are donated.

    Raises:
        TypeError: An argument is of another kind.

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
        self._ahead = Held(None)
        self._rooms = Rooms(self._model)
        self._alone = compile_step(step, *modules)
        self._routed = compile_step(self._step_and_route, *modules, self._ahead)
        self._find_now = jax.jit(
            lambda graph, state, batch: self._find(nnx.merge(graph, state), batch), static_argnums=0
        )

    def __call__(self, batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Makes a step with each batch.

        Args:
            batches: Batches on the devices; one more is taken than there are steps made.

        Yields:
            Each batch, and what the step returned for it, not waited for.

        Raises:
            TypeError: ``batches`` is a single batch.
        """
        batches = each_batch(batches)
        batch = next(batches, None)
        if batch is None:
            return
        self._route(batch)
        if not jax.tree.leaves(self._ahead.get()):
            for each in itertools.chain((batch,), batches):
                yield each, self._alone(each)
            return
        unread: collections.deque[Any] = collections.deque()
        for following in itertools.chain(batches, (None,)):
            # After the last there is nothing to route; it is routed again.
            result, loads = self._routed(batch, batch if following is None else following)
            yield batch, result
            if following is None:
                return
            batch = following
            unread.append(loads)
            if len(unread) > _UNREAD and self._rooms.see(jax.tree.map(on_host, unread.popleft())):
                self._route(batch)

    def _route(self, batch: Any) -> None:
        """Routes a batch by itself."""
        graph, state = nnx.split(self._model)
        self._ahead.set(self._find_now(graph, state, batch))

    def _step_and_route(self, *args: Any) -> tuple[Any, dict[Group, Array]]:
        *modules, ahead, batch, following = args
        model = modules[0]
        with use_ahead(model, ahead.get()):
            result = self._step(*modules, batch)
        found = self._find(model, following)
        ahead.set(found)
        return result, measured_loads(found)

    def _find(self, model: nnx.Module, batch: Any) -> dict[str, list[Ahead]]:
        return route_ahead(lambda model: self._forward(model, batch), model)
