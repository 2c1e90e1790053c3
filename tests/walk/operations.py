"""An entry of every public name of `jaxrec.ragged`, and of the functions of `jaxrec.nn`.

`EACH` has functions of one batch, which `jax.vmap` applies over a mesh; `WHOLE` has functions that
take a batch over a mesh as it is; `SAMPLES` has functions of dense arrays, cut by samples; `HOST`
has functions that run outside of compiled code. A name may be in several. `TYPES` are names of
types.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec import nn, ragged
from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray, complete_cumsum, fbgemm
from tests.walk.meshes import DEVICES

ROWS, CAPACITY, LENGTH, DIM, IDS = 3, 8, 4, 4, 20
LENGTHS = np.array([[2, 0, 3], [1, 5, 1]], np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Ragged inputs; over a mesh, and in `batch_of`, each has an axis over the devices in front.

    Attributes:
        lengths: ``[rows]``.
        values: ``[capacity, dim]``.
        scores: ``[capacity]``.
        ids: ``[capacity]``.
        dense: ``[rows, length, dim]``.
        matrix: ``[rows, dim, 2]``.
        per_head: ``[2 * rows, length]``.
        candidates: ``[2 * rows, dim]``.
        order: ``[rows]``, a permutation.
        bias: ``[6, 2]``.
        keyed: Keys a and b of rows bags each, with weights.
    """

    lengths: Any
    values: Any
    scores: Any
    ids: Any
    dense: Any
    matrix: Any
    per_head: Any
    candidates: Any
    order: Any
    bias: Any
    keyed: KeyedJaggedArray

    @property
    def offsets(self) -> Array:
        return complete_cumsum(self.lengths)

    @property
    def column(self) -> JaggedArray:
        return JaggedArray(self.values, self.lengths, self.scores)

    @property
    def heads(self) -> Array:
        """The values of two heads, ``[capacity, 2, dim / 2]``."""
        return jnp.reshape(self.values, (*self.values.shape[:-1], 2, DIM // 2))


def batch_of(padding: float = 0.0, padding_id: int = 0) -> Batch:
    """Draw the batches of all devices, on the host, and fill their padding."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((DEVICES, *shape)).astype(np.float32)

    def filled(array: np.ndarray, lengths: np.ndarray, padding: float) -> np.ndarray:
        ends = lengths.sum(axis=1).reshape(-1, 1)
        used = np.arange(CAPACITY)[None] < ends
        used = used.reshape(used.shape + (1,) * (array.ndim - 2))
        return np.where(used, array, np.asarray(padding, array.dtype))

    def ids() -> np.ndarray:
        return rng.integers(0, IDS, (DEVICES, CAPACITY)).astype(np.int32)

    backwards = LENGTHS[:, ::-1]
    keyed = KeyedJaggedArray._of(
        np.concatenate(
            [filled(ids(), LENGTHS, padding_id), filled(ids(), backwards, padding_id)], axis=1
        ),
        np.concatenate([LENGTHS, backwards], axis=1),
        np.concatenate(
            [
                filled(normal(CAPACITY), LENGTHS, padding),
                filled(normal(CAPACITY), backwards, padding),
            ],
            axis=1,
        ),
        None,
        ("a", "b"),
        (CAPACITY, CAPACITY),
        (ROWS, ROWS),
    )
    return Batch(
        lengths=LENGTHS,
        values=filled(normal(CAPACITY, DIM), LENGTHS, padding),
        scores=filled(normal(CAPACITY), LENGTHS, padding),
        ids=filled(ids(), LENGTHS, padding_id),
        dense=normal(ROWS, LENGTH, DIM),
        matrix=normal(ROWS, DIM, 2),
        per_head=normal(2 * ROWS, LENGTH),
        candidates=normal(2 * ROWS, DIM),
        order=np.array([[2, 0, 1], [1, 2, 0]], np.int32),
        bias=normal(6, 2),
        keyed=keyed,
    )


EACH = {
    "JaggedArray": lambda b: (
        b.column.to_padded_dense(LENGTH),
        b.column.to_padded_dense_weights(LENGTH, 0.5),
        b.column.offsets,
        b.column.segment_ids,
        JaggedArray.from_dense(b.dense, b.lengths),
    ),
    "KeyedJaggedArray": lambda b: (
        b.keyed.permute([1, 0, 1]),
        b.keyed.offset_per_key,
        b.keyed.segment_ids,
        b.keyed.length_per_key,
        KeyedJaggedArray.from_dict(b.keyed.to_dict()),
    ),
    "KeyedArray": lambda b: KeyedArray.from_arrays({"a": b.matrix[..., 0], "b": b.bias[:ROWS]})[
        "b"
    ],
    "WideIds": lambda b: ragged.WideIds(b.ids >> 31, b.ids).is_below(7),
    "batched_dense_vec_jagged_2d_mul": lambda b: fbgemm.batched_dense_vec_jagged_2d_mul(
        b.per_head, b.values, b.offsets
    ),
    "block_bucketize_sparse_features": lambda b: fbgemm.block_bucketize_sparse_features(
        b.lengths, b.ids, jnp.array([7], jnp.int32), num_buckets=3
    ),
    "boundary_bucketize_sparse_features": lambda b: fbgemm.boundary_bucketize_sparse_features(
        b.lengths, b.ids, jnp.array([[0, 3, 11, 20]], jnp.int32)
    ),
    "bucketize_sparse_features": lambda b: fbgemm.bucketize_sparse_features(b.lengths, b.ids, 3),
    "complete_cumsum": lambda b: complete_cumsum(b.lengths),
    "dense_to_jagged": lambda b: fbgemm.dense_to_jagged(b.dense, b.offsets, CAPACITY),
    "Packer": lambda b: ragged.Packer().fit(b.keyed).lengths,
    "equal": lambda b: ragged.equal(b.keyed, b.keyed.permute([1, 0])),
    "exclusive_cumsum": lambda b: ragged.exclusive_cumsum(b.lengths),
    "expand_into_jagged_permute": lambda b: fbgemm.expand_into_jagged_permute(
        b.order, b.offsets, complete_cumsum(b.lengths[b.order]), CAPACITY
    ),
    "hstu_attention": lambda b: nn.hstu_attention(
        b.heads,
        b.heads,
        b.heads,
        b.lengths,
        scale=0.5,
        position_bias=b.bias,
        time_bias=b.bias,
        timestamps=b.ids,
        block_size=3,
    ),
    "inclusive_cumsum": lambda b: ragged.inclusive_cumsum(b.lengths),
    "invert_permute": lambda b: fbgemm.invert_permute(b.order),
    "jagged_1d_to_truncated_values": lambda b: fbgemm.jagged_1d_to_truncated_values(
        b.values, b.lengths, 2
    ),
    "jagged_attention": lambda b: nn.jagged_attention(
        b.heads, b.heads, b.heads, b.lengths, block_size=3
    ),
    "jagged_dense_bmm": lambda b: ragged.jagged_dense_bmm(b.column, b.matrix, LENGTH),
    "jagged_dense_dense_elementwise_add_jagged_output": lambda b: (
        fbgemm.jagged_dense_dense_elementwise_add_jagged_output(
            b.values, b.offsets, b.dense, b.dense**2
        )
    ),
    "jagged_dense_elementwise_add": lambda b: fbgemm.jagged_dense_elementwise_add(
        b.values, b.offsets, b.dense
    ),
    "jagged_dense_elementwise_add_jagged_output": lambda b: (
        ragged.jagged_dense_elementwise_add_jagged_output(b.column, b.dense)
    ),
    "jagged_dense_elementwise_mul": lambda b: ragged.jagged_dense_elementwise_mul(
        b.column, b.dense
    ),
    "jagged_index_select": lambda b: ragged.jagged_index_select(b.column, b.order, 9),
    "jagged_jagged_bmm": lambda b: ragged.jagged_jagged_bmm(b.column, b.column, LENGTH),
    "jagged_slice": lambda b: ragged.jagged_slice(b.column, b.order, 2),
    "jagged_softmax": lambda b: (
        ragged.jagged_softmax(b.column),
        fbgemm.jagged_softmax(b.scores, b.offsets),
    ),
    "jagged_to_padded_dense": lambda b: fbgemm.jagged_to_padded_dense(b.values, b.offsets, LENGTH),
    "jagged_unique_indices": lambda b: ragged.jagged_unique_indices(b.keyed, [["a", "b"]]),
    "keyed_jagged_index_select": lambda b: ragged.keyed_jagged_index_select(b.keyed, b.order),
    "lengths_range": lambda b: ragged.lengths_range(b.lengths, CAPACITY),
    "offsets_range": lambda b: ragged.offsets_range(b.offsets, CAPACITY),
    "pack_segments": lambda b: fbgemm.pack_segments(b.values, b.lengths, LENGTH, 2.0),
    "permute_sparse_data": lambda b: fbgemm.permute_sparse_data(
        b.order, b.lengths, b.ids, b.scores, CAPACITY
    ),
    "segment_ids": lambda b: ragged.segment_ids(b.offsets, CAPACITY),
    "segment_mask": lambda b: fbgemm.segment_mask(b.lengths, LENGTH),
    "segment_sum_csr": lambda b: ragged.segment_sum_csr(b.column),
    "unpack_segments": lambda b: fbgemm.unpack_segments(b.dense, b.lengths, CAPACITY),
}

WHOLE = {
    "JaggedArray": lambda b: (
        b.column.to_padded_dense(LENGTH),
        b.column.to_padded_dense_weights(LENGTH, 0.5),
    ),
    "KeyedJaggedArray": lambda b: (
        b.keyed["b"],
        b.keyed.permute([1, 0, 1]),
        b.keyed.select(["b"]),
        b.keyed.split([1, 1]),
        KeyedJaggedArray.concat([b.keyed.select(["b"]), b.keyed.select(["a"])]),
        b.keyed.with_capacities({"a": CAPACITY + 4}),
    ),
    "WideIds": lambda b: ragged.WideIds(b.ids >> 31, b.ids).narrow(),
    "candidate_scores": lambda b: nn.candidate_scores(b.column, b.candidates),
    "complete_cumsum": lambda b: complete_cumsum(b.lengths),
    "exclusive_cumsum": lambda b: ragged.exclusive_cumsum(b.lengths),
    "hstu_attention": lambda b: nn.hstu_attention(
        b.heads, b.heads, b.heads, b.lengths, scale=0.5, block_size=3
    ),
    "inclusive_cumsum": lambda b: ragged.inclusive_cumsum(b.lengths),
    "jagged_attention": lambda b: nn.jagged_attention(
        b.heads, b.heads, b.heads, b.lengths, causal=True, block_size=3
    ),
    "last_states": lambda b: nn.last_states(b.column),
    "positions_in_rows": lambda b: nn.positions_in_rows(b.column),
    "sampled_softmax_loss": lambda b: nn.sampled_softmax_loss(
        b.candidates, b.candidates**2, b.bias @ jnp.ones((2, DIM))
    ),
    "time_bucket": lambda b: nn.time_bucket(b.order, 6),
}


def squares(layer: nnx.Linear, x: Array) -> Array:
    return (layer(x) ** 2).sum(axis=1)


def summed(x: Array) -> tuple[Array, Any]:
    return nn.sum_in_chunks(squares, nnx.Linear(DIM, 2, rngs=nnx.Rngs(0)), x, samples=2)


# Functions of ``vectors``, ``[batch, n, dim]``.
SAMPLES = {
    "KeyedArray": lambda v: KeyedArray.regroup(
        [KeyedArray.from_arrays({"a": v[:, 0], "b": v[:, 1]})], [["b", "a"], ["a"]]
    ),
    "flatten_embeddings": lambda v: nn.flatten_embeddings([v, v[:, 0]]),
    "in_batch_softmax_loss": lambda v: (
        nn.in_batch_softmax_loss(v[:, 0], v[:, 1]),
        nn.in_batch_softmax_loss(
            v[:, 0],
            v[:, 1],
            log_q=v[:, 2, 0],
            ids=(v[:, 2, 1] > 0).astype(jnp.int32),
            hard_negatives=v[:, 1:],
        ),
    ),
    "pairwise_dots": nn.pairwise_dots,
    "sum_in_chunks": lambda v: summed(v[:, 0]),
}

HOST = {
    "Packer": lambda b: ragged.Packer().fit(b.keyed).lengths,
    "equal": lambda b: ragged.equal(b.keyed, b.keyed.permute([1, 0])),
    "hash_ids": lambda b: ragged.hash_ids(b.ids, 1000),
    "join_int64": lambda b: ragged.join_int64(ragged.split_int64(b.ids)),
    "split_int64": lambda b: ragged.split_int64(b.ids),
    "stochastic_length": lambda b: (
        nn.stochastic_length(
            jax.tree.map(lambda array: np.asarray(array)[0], b.keyed),
            ["a"],
            max_length=2,
            alpha=1.0,
            rng=np.random.default_rng(0),
        ).lengths
    ),
    "validate": lambda b: ragged.validate(b.keyed, {"a": IDS}).lengths,
}

TYPES = {
    "Activation",
    "BoundsMode",
    "Bucketized",
    "HistoryCache",
    "PackOptions",
    "RankerFeatures",
    "SequenceOptions",
    "TargetTask",
    "UniqueIndices",
}
