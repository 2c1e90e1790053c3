"""Pools: rows, and ragged features, by user id. They lie on devices and training updates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike, Int, Int32, Shaped

from jaxrec.mesh.pool_rows import PoolRows
from jaxrec.ragged import JaggedArray, KeyedJaggedArray
from jaxrec.ragged.bounds import BAD_ID
from jaxrec.ragged.fbgemm import dense_to_jagged, jagged_to_padded_dense
from jaxrec.ragged.offsets import complete_cumsum

Index = Int[Array | np.ndarray, " batch"]


class TensorPool(nnx.Module):
    """Rows by id, such as vectors of users that one step computes and later steps read.

    TorchRec's module of that name. Rows start at zero. They are not parameters: they get no
    gradient and no optimizer changes them. `jaxrec.shard` puts the rows in equal shards over the
    model's mesh, and checkpoints save them.

    Args:
        pool_size: Number of ids. On a mesh a multiple of the number of devices.
        dim: Number of columns of a row.
        dtype: Type of the elements, of 1, 2 or 4 bytes.
        mesh: Devices to make the rows on; None: one device, or those of `jaxrec.shard`.

    Raises:
        ValueError: A size is below 1, or the number of devices does not divide ``pool_size``.
        TypeError: Elements of ``dtype`` have more than 4 bytes.

    Example:
        >>> pool = TensorPool(pool_size=10, dim=2)
        >>> pool.update(jnp.array([1, 9]), jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        >>> pool(jnp.array([9, 0])).tolist()
        [[3.0, 4.0], [0.0, 0.0]]
    """

    def __init__(
        self, pool_size: int, dim: int, dtype: DTypeLike = "float32", *, mesh: Mesh | None = None
    ):
        self.pool = PoolRows(pool_size, dim, dtype, mesh=mesh)

    @property
    def pool_size(self) -> int:
        """Number of ids."""
        return self.pool.shape[0]

    @property
    def dim(self) -> int:
        """Number of columns of a row."""
        return self.pool.shape[1]

    def lookup(self, ids: Index) -> Shaped[Array, "batch dim"]:
        """Return the rows of ids; works under jit.

        Args:
            ids: ``[batch]`` integers. Over a mesh the number of devices must divide ``batch``, as
                for `jaxrec.mesh.shard_batch`.

        Returns:
            ``[batch, dim]``. Under jit no error can be raised, and an id outside gives zeros.

        Raises:
            IndexError: An id is outside ``[0, pool_size)``.
        """
        _check_ids(ids, self.pool_size)
        return self.pool.read(ids)

    __call__ = lookup

    def update(self, ids: Index, values: Shaped[Array | np.ndarray, "batch dim"]) -> None:
        """Set the rows of ids, in place if the module is donated; works under jit.

        Args:
            ids: ``[batch]`` integers. If an id is repeated, its last row is kept. Under jit an id
                outside is skipped; use -1 for padding.
            values: ``[batch, dim]``, converted to the pool's type.

        Raises:
            IndexError: An id is outside ``[0, pool_size)``.
            ValueError: The values have another shape.
        """
        _check_ids(ids, self.pool_size)
        if values.shape != (ids.shape[0], self.dim):
            raise ValueError(
                f"values have shape {tuple(values.shape)}; expected {(ids.shape[0], self.dim)}, a "
                "row for each id"
            )
        self.pool.write(ids, jnp.asarray(values))


class KeyedJaggedTensorPool(nnx.Module):
    """Ragged features by id, such as histories of users; a lookup returns them as a batch.

    TorchRec's module of that name. Each id has a bag per feature, which starts empty. A row takes 4
    bytes per feature and 4 bytes (8 with weights) per value that its bags have space for. Like the
    rows of `TensorPool` they are not parameters, are sharded by `jaxrec.shard`, and are saved in
    checkpoints.

    Args:
        pool_size: Number of ids. On a mesh a multiple of the number of devices.
        feature_max_lengths: Largest number of values in a bag, by feature.
        values_dtype: "int32", or "float32" for values that are not ids.
        is_weighted: Whether each value has a weight.
        mesh: As for `TensorPool`.

    Raises:
        ValueError: A size is below 1, there is no feature, ``values_dtype`` is another type, or the
            number of devices does not divide ``pool_size``.

    Example:
        >>> pool = KeyedJaggedTensorPool(10, feature_max_lengths={"clicks": 3, "likes": 2})
        >>> batch = KeyedJaggedArray.from_lists({"clicks": [[7], [1, 2, 3]], "likes": [[4], []]})
        >>> pool.update(jnp.array([6, 0]), batch)
        >>> pool(jnp.array([0, 5, 6])).to_lists()
        {'clicks': [[1, 2, 3], [], [7]], 'likes': [[], [], [4]]}
    """

    changes_ids = True  # see `jaxrec.mesh.ahead.changes_ids`

    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: Mapping[str, int],
        values_dtype: Literal["int32", "float32"] = "int32",
        *,
        is_weighted: bool = False,
        mesh: Mesh | None = None,
    ):
        if not feature_max_lengths:
            raise ValueError("KeyedJaggedTensorPool: feature_max_lengths names no feature")
        for key, length in feature_max_lengths.items():
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise ValueError(
                    f"KeyedJaggedTensorPool: the largest length of feature {key!r} is an integer "
                    f"of 1 or more, got {length!r}"
                )
        if values_dtype not in ("int32", "float32"):
            raise ValueError(f"values_dtype is 'int32' or 'float32', got {values_dtype!r}")
        self.row = RowOfBags(tuple(feature_max_lengths.items()), values_dtype, is_weighted)
        self.pool = PoolRows(pool_size, self.row.width, "int32", mesh=mesh)

    @property
    def pool_size(self) -> int:
        """Number of ids."""
        return self.pool.shape[0]

    @property
    def feature_max_lengths(self) -> dict[str, int]:
        """Largest number of values in a bag, by feature."""
        return dict(self.row.lengths)

    def lookup(self, ids: Index) -> KeyedJaggedArray:
        """Return the bags of ids as a batch; works under jit.

        Args:
            ids: As for `TensorPool.lookup`.

        Returns:
            A batch of the features in the order of ``feature_max_lengths``, whose capacities hold
            the longest bags. Over a mesh it has an axis over the devices, as from `shard_batch`.
            Under jit no error can be raised, and an id outside gives empty bags.

        Raises:
            IndexError: An id is outside ``[0, pool_size)``.
        """
        _check_ids(ids, self.pool_size)
        return self.pool.read(ids, self.row.unpack)

    __call__ = lookup

    def update(self, ids: Index, values: KeyedJaggedArray) -> None:
        """Set the bags of ids, in place if the module is donated; works under jit.

        Args:
            ids: As for `TensorPool.update`.
            values: A batch with one sample per id, over a mesh from `shard_batch`. Features that
                the pool lacks are left out. Under jit no error can be raised. The values of a bag
                that is too long then become -1, whose embedding is NaN, or NaN for floats.

        Raises:
            IndexError: An id is outside ``[0, pool_size)``.
            KeyError: The batch lacks a feature.
            TypeError: The batch's values have another type than the pool's.
            ValueError: The batch has another number of samples, has ``inverse_indices``, lacks
                weights that the pool has, or has a bag longer than its feature allows; or only one
                of pool and batch is on a mesh.
        """
        _check_ids(ids, self.pool_size)
        devices = 1 if self.pool.mesh is None else self.pool.mesh.size
        self.row.check(values, ids.shape[0], devices, is_on_mesh=self.pool.mesh is not None)
        self.pool.write(ids, jax.tree.map(jnp.asarray, values), self.row.pack)


@dataclasses.dataclass(frozen=True)
class RowOfBags:
    """Layout of an id's bags in a row of 32-bit numbers: lengths, values, then weights."""

    # Each feature's name and the largest length of its bags.
    lengths: tuple[tuple[str, int], ...]
    values_dtype: str
    is_weighted: bool

    @property
    def width(self) -> int:
        return len(self.lengths) + sum(n for _, n in self.lengths) * (2 if self.is_weighted else 1)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, _ in self.lengths)

    def pack(self, batch: KeyedJaggedArray) -> Int32[Array, "batch width"]:
        """Return the samples of a batch as rows; traced."""
        lengths, values, weights = [], [], []
        for key, largest in self.lengths:
            column = batch[key]
            offsets, is_long = complete_cumsum(column.lengths), column.lengths > largest
            # A cut history would train in silence, so all of a bag that is too long is marked bad.
            bad = BAD_ID if self.values_dtype == "int32" else jnp.nan
            dense = jagged_to_padded_dense(column.values, offsets, largest)
            dense = jnp.where(is_long[:, None], bad, dense).astype(self.values_dtype)
            lengths.append(jnp.minimum(column.lengths, largest)[:, None])
            values.append(jax.lax.bitcast_convert_type(dense, jnp.int32))
            if self.is_weighted and column.weights is not None:
                of_bags = jagged_to_padded_dense(column.weights, offsets, largest)
                of_bags = jnp.where(is_long[:, None], jnp.nan, of_bags).astype(jnp.float32)
                weights.append(jax.lax.bitcast_convert_type(of_bags, jnp.int32))
        return jnp.concatenate([*lengths, *values, *weights], axis=1)

    def unpack(self, rows: Int32[Array, "batch width"]) -> KeyedJaggedArray:
        """Return rows as a batch; traced."""
        # A row keeps floats by their bits. So one int32 array holds lengths, ids and weights, and a
        # lookup over a mesh sends one row, not three.
        count = len(self.lengths)
        starts = np.cumsum([count, *(n for _, n in self.lengths)])
        columns = {}
        for number, (key, largest) in enumerate(self.lengths):
            lengths, first = rows[:, number], starts[number]
            offsets, capacity = complete_cumsum(lengths), rows.shape[0] * largest
            values = dense_to_jagged(rows[:, first : first + largest], offsets, capacity)
            weights = None
            if self.is_weighted:
                # All weights lie behind all values, in the same order.
                first += starts[-1] - count
                weights = dense_to_jagged(rows[:, first : first + largest], offsets, capacity)
                weights = jax.lax.bitcast_convert_type(weights, jnp.float32)
            values = jax.lax.bitcast_convert_type(values, jnp.dtype(self.values_dtype))
            columns[key] = JaggedArray(values, lengths, weights)
        return KeyedJaggedArray.from_dict(columns)

    def check(
        self, batch: KeyedJaggedArray, samples: int, devices: int, *, is_on_mesh: bool
    ) -> None:
        """Require a batch with one bag per sample and feature that fits the rows."""
        if missing := [key for key in self.keys if key not in batch.keys]:
            raise KeyError(f"the batch lacks {missing}; its keys are {list(batch.keys)}")
        if batch.inverse_indices is not None:
            raise ValueError("a pool takes batches without inverse_indices: a bag for each sample")
        if (batch.lengths.ndim == 2) != is_on_mesh:
            raise ValueError(
                "a pool on a mesh takes batches of jaxrec.mesh.shard_batch, and one on a single "
                f"device batches without an axis over devices; got lengths of {batch.lengths.shape}"
            )
        strides = {key: batch[key].lengths.shape[-1] * devices for key in self.keys}
        if wrong := [key for key in self.keys if strides[key] != samples]:
            raise ValueError(
                f"feature {wrong[0]!r} has {strides[wrong[0]]} bags for {samples} ids; each id "
                "needs one"
            )
        if batch.values.dtype != self.values_dtype:
            raise TypeError(f"the pool holds {self.values_dtype}, the batch {batch.values.dtype}")
        if self.is_weighted and batch.weights is None:
            raise ValueError("the pool has weights, the batch has none")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batch)):
            return
        for key, largest in self.lengths:
            lengths = np.asarray(batch[key].lengths).reshape(-1)
            if (is_long := lengths > largest).any():
                sample = int(np.argmax(is_long))
                raise ValueError(
                    f"feature {key!r}, sample {sample}: {lengths[sample]} values, but bags of the "
                    f"pool hold {largest}"
                )


def _check_ids(ids: Index, pool_size: int) -> None:
    """Refuse ids outside the pool; traced ones pass."""
    if isinstance(ids, jax.core.Tracer):
        return
    host = np.asarray(ids)
    if host.dtype.kind in "iu" and (wrong := (host < 0) | (host >= pool_size)).any():
        sample = int(np.argmax(wrong))
        raise IndexError(
            f"sample {sample}: id {host[sample]} is outside [0, {pool_size}), the ids of the pool"
        )
