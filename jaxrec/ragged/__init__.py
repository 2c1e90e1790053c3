"""Ragged batches as padded arrays: the types, their operations, packing from host data."""

from jaxrec._public import moved_names as _moved_names
from jaxrec._public import public_names as _public_names
from jaxrec.ragged import fbgemm as fbgemm
from jaxrec.ragged.bounds import BoundsMode as BoundsMode
from jaxrec.ragged.equality import equal as equal
from jaxrec.ragged.hashing import hash_ids as hash_ids
from jaxrec.ragged.jagged import JaggedArray as JaggedArray
from jaxrec.ragged.keyed_array import KeyedArray as KeyedArray
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray as KeyedJaggedArray
from jaxrec.ragged.offsets import complete_cumsum as complete_cumsum
from jaxrec.ragged.offsets import exclusive_cumsum as exclusive_cumsum
from jaxrec.ragged.offsets import inclusive_cumsum as inclusive_cumsum
from jaxrec.ragged.offsets import lengths_range as lengths_range
from jaxrec.ragged.offsets import offsets_range as offsets_range
from jaxrec.ragged.offsets import segment_ids as segment_ids
from jaxrec.ragged.operations import jagged_dense_bmm as jagged_dense_bmm
from jaxrec.ragged.operations import (
    jagged_dense_elementwise_add_jagged_output as jagged_dense_elementwise_add_jagged_output,
)
from jaxrec.ragged.operations import jagged_dense_elementwise_mul as jagged_dense_elementwise_mul
from jaxrec.ragged.operations import jagged_index_select as jagged_index_select
from jaxrec.ragged.operations import jagged_jagged_bmm as jagged_jagged_bmm
from jaxrec.ragged.operations import jagged_slice as jagged_slice
from jaxrec.ragged.operations import jagged_softmax as jagged_softmax
from jaxrec.ragged.operations import segment_sum_csr as segment_sum_csr
from jaxrec.ragged.packer import Packer as Packer
from jaxrec.ragged.packing import PackOptions as PackOptions
from jaxrec.ragged.select import UniqueIndices as UniqueIndices
from jaxrec.ragged.select import jagged_unique_indices as jagged_unique_indices
from jaxrec.ragged.select import keyed_jagged_index_select as keyed_jagged_index_select
from jaxrec.ragged.validation import validate as validate
from jaxrec.ragged.wide_ids import WideIds as WideIds
from jaxrec.ragged.wide_ids import join_int64 as join_int64
from jaxrec.ragged.wide_ids import split_int64 as split_int64

__all__ = _public_names(globals(), "fbgemm")

# FBGEMM's operations on arrays alone, which earlier versions had here.
_MOVED = (
    "Bucketized",
    "batched_dense_vec_jagged_2d_mul",
    "block_bucketize_sparse_features",
    "boundary_bucketize_sparse_features",
    "bucketize_sparse_features",
    "dense_to_jagged",
    "expand_into_jagged_permute",
    "invert_permute",
    "jagged_1d_to_truncated_values",
    "jagged_dense_dense_elementwise_add_jagged_output",
    "jagged_dense_elementwise_add",
    "jagged_to_padded_dense",
    "pack_segments",
    "permute_sparse_data",
    "segment_mask",
    "unpack_segments",
)
__getattr__ = _moved_names(__name__, {name: f"jaxrec.ragged.fbgemm.{name}" for name in _MOVED})


def __dir__() -> list[str]:
    return __all__
