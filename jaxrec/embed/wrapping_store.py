"""Base of table stores that change a few methods of another store."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from jaxrec.embed.row_gradients import Activations, Residuals, Routes, RowGradients
from jaxrec.embed.store import TableStore
from jaxrec.optim.hyperparameters import Step
from jaxrec.ragged import KeyedJaggedArray

Store = TypeVar("Store", bound="WrappingStore")


@dataclasses.dataclass(frozen=True)
class WrappingStore(TableStore):
    """A store that passes every call on to an inner store, on one device or over a mesh.

    Derive from it to change a few methods of any store: to refuse some batches, say, or to count
    updates. Implementors do the following:

    1. Derive a frozen dataclass from `WrappingStore`, register it as a pytree
       (`jax.tree_util.register_dataclass`), and add fields after `inner`. Arrays are leaves; other
       fields are static.
    2. Override the methods to change, and call the same method of `inner` in them. If `inner`
       returns a store, return it as ``self.with_inner(...)``. A store that overrides `route`,
       `lookup` or `update` fetches no rows ahead (`TableStore.fetch`).
    3. Put it around a model's store: ``collection.tables.set_value(Wrapper(store))``.

    Attributes:
        inner: The store that has the rows, or another wrapping store.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass(frozen=True)
        ... class ReadOnly(WrappingStore):
        ...     def update(self, calls, step, is_applied=None):
        ...         raise TypeError("the tables of this model are not trained")
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> embeddings = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> embeddings.tables.set_value(ReadOnly(embeddings.tables.get_value()))
        >>> embeddings(jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], []]}))["user"].shape
        (2, 8)
    """

    inner: TableStore

    def with_inner(self: Store, inner: TableStore) -> Store:
        """Return this store around another inner store."""
        return dataclasses.replace(self, inner=inner)

    # The four abstract methods are written out. Most others are added below the class, too late for
    # `abc`, which looks for methods that are missing when the class is made.

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        return self.inner.lookup(features, is_weighted=is_weighted, dtype=dtype, routes=routes)

    # Rows that came ahead are the rows of `inner`'s lookup, fetched again where its update wrote
    # them. A subclass may look up other ids, or write more rows.

    def fetch(
        self,
        features: KeyedJaggedArray,
        routes: Routes,
        waiting: Any,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
    ) -> tuple[Routes, Any, Bool[Array, ""]]:
        fetch = super().fetch if self._changes_rows else self.inner.fetch
        return fetch(features, routes, waiting, is_weighted=is_weighted, dtype=dtype)

    def refetch(
        self,
        features: KeyedJaggedArray,
        routes: Routes,
        updated: Sequence[Routes],
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
    ) -> Routes:
        refetch = super().refetch if self._changes_rows else self.inner.refetch
        return refetch(features, routes, updated, is_weighted=is_weighted, dtype=dtype)

    @property
    def _changes_rows(self) -> bool:
        names = ("route", "lookup", "update")
        return any(getattr(type(self), name) is not getattr(WrappingStore, name) for name in names)

    def update(
        self: Store,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> Store:
        return self.with_inner(self.inner.update(calls, step, is_applied))

    def read_rows(
        self, group: str, slots: Int32[Array, "*devices n"]
    ) -> tuple[Float[Array, "*devices n dim"], dict[str, Array]]:
        return self.inner.read_rows(group, slots)

    def write_rows(
        self: Store,
        group: str,
        slots: Int32[Array, "*devices n"],
        rows: Float[Array, "*devices n dim"],
        state: Mapping[str, Array],
    ) -> Store:
        return self.with_inner(self.inner.write_rows(group, slots, rows, state))


def _pass_on(name: str) -> Any:
    """Return a method or property that passes on to the inner store's of the same name."""
    member = getattr(TableStore, name)
    if isinstance(member, property):
        return property(lambda self: getattr(self.inner, name), doc=member.__doc__)
    method = _store_method(name) if _returns_store(member) else _value_method(name)
    method.__name__, method.__doc__ = name, member.__doc__
    return method


def _value_method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(self.inner, name)(*args, **options)


def _store_method(name: str) -> Callable[..., Any]:
    def method(self: WrappingStore, *args: Any, **options: Any) -> WrappingStore:
        return self.with_inner(getattr(self.inner, name)(*args, **options))

    return method


def _returns_store(method: Callable[..., Any]) -> bool:
    # Annotations are strings in that module. A method of the interface that returns a store, and so
    # must be wrapped again, says so there.
    return inspect.signature(method).return_annotation == TableStore.__name__


# The rest of the interface is generated, so that a new method of `TableStore` is never forgotten
# here. Not `rows_of`: its handle must call this store's `find_ids`, which a subclass may override.
for _name in vars(TableStore):
    if not _name.startswith("_") and _name not in {*vars(WrappingStore), "rows_of"}:
        setattr(WrappingStore, _name, _pass_on(_name))
# In `TableStore`, `layout` is an annotation without a value, which `vars` does not list.
WrappingStore.layout = property(lambda self: self.inner.layout)
