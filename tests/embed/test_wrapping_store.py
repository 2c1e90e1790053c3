"""A store around another one: what it does not override is the other store's, whatever that is."""

from __future__ import annotations

import dataclasses
import inspect
from unittest.mock import MagicMock

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import TableStore, WrappingStore

NAMES = [name for name in vars(TableStore) if not name.startswith("_")]
PROPERTIES = [name for name in NAMES if isinstance(vars(TableStore)[name], property)]
METHODS = [name for name in NAMES if inspect.isfunction(vars(TableStore)[name])]
METHODS.remove("rows_of")  # a wrapping store's own, by its `find_ids`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain(WrappingStore):
    """A store that changes nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Negative(WrappingStore):
    """A store with a field of its own, which reads the negative of what is written."""

    name: str = dataclasses.field(default="negative", metadata={"static": True})

    def read(self, name):
        return -self.inner.read(name)


@pytest.fixture
def recorder():
    """A store that keeps the calls of its methods."""
    store = MagicMock(spec=TableStore)
    store.layout = object()
    return store


def test_the_interface_has_only_properties_and_methods():
    assert sorted(NAMES) == sorted([*PROPERTIES, *METHODS, "rows_of"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["layout", *PROPERTIES])
def test_properties_are_those_of_the_inner_store(recorder, name):
    assert getattr(Plain(recorder), name) is getattr(recorder, name)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", METHODS)
def test_methods_are_passed_on_with_all_arguments(recorder, name):
    signature = inspect.signature(getattr(TableStore, name))
    _, *parameters = signature.parameters.values()
    arguments = {parameter.name: object() for parameter in parameters}
    by_name = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    store = Negative(recorder, "mine") if name != "read" else Plain(recorder)
    result = getattr(store, name)(
        *(value for key, value in arguments.items() if key not in by_name),
        **{key: value for key, value in arguments.items() if key in by_name},
    )
    method = getattr(recorder, name)
    method.assert_called_once()
    call = signature.bind(recorder, *method.call_args.args, **method.call_args.kwargs)
    assert call.arguments == {"self": recorder, **arguments}
    if signature.return_annotation == "TableStore":
        assert result == Negative(method.return_value, "mine")
    elif name.startswith("check_"):
        assert result is None
    else:
        assert result is method.return_value


def model(*wrappers):
    config = jaxrec.EmbeddingBagConfig("item", 16, 4)
    collection = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    for wrapper in wrappers:
        collection.tables.set_value(wrapper(collection.tables.get_value()))
    return collection


def train(model, features):
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def train_step(model, optimizer):
        def loss_fn(model):
            return (model(features).values ** 2).sum()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    return [float(train_step(model, optimizer)) for _ in range(3)]


@pytest.mark.parametrize("is_on_mesh", [False, True], ids=["one device", "mesh"])
def test_training_equals_that_of_the_inner_store(is_on_mesh):
    features = jaxrec.KeyedJaggedArray.from_lists({"item": [[1, 2], [3], [], [2]]})
    plain, wrapped = model(), model(Negative, Plain)
    if is_on_mesh:
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        plan = jaxrec.plan.ShardingPlan.from_dict({"item": jaxrec.mesh.row_wise()})
        plain, wrapped = (jaxrec.shard(each, plan, mesh) for each in (plain, wrapped))
        features = jaxrec.mesh.shard_batch(features, mesh)
    assert train(wrapped, features) == train(plain, features)
    store = wrapped.tables.get_value()
    assert isinstance(store, Plain)
    assert store.inner.name == "negative"
    np.testing.assert_array_equal(wrapped.table("item"), -plain.table("item"))
