"""Ragged batches as padded arrays: the types, their operations, packing from host data."""

from jaxrec.ragged.bounds import BoundsMode as BoundsMode
from jaxrec.ragged.bucketize import Bucketized as Bucketized
from jaxrec.ragged.bucketize import (
    block_bucketize_sparse_features as block_bucketize_sparse_features,
)
from jaxrec.ragged.bucketize import (
    boundary_bucketize_sparse_features as boundary_bucketize_sparse_features,
)
from jaxrec.ragged.bucketize import bucketize_sparse_features as bucketize_sparse_features
from jaxrec.ragged.dense import dense_to_jagged as dense_to_jagged
from jaxrec.ragged.dense import jagged_to_padded_dense as jagged_to_padded_dense
from jaxrec.ragged.elementwise import (
    jagged_dense_dense_elementwise_add_jagged_output as jagged_dense_dense_elementwise_add_jagged_output,  # noqa: E501
)
from jaxrec.ragged.elementwise import jagged_dense_elementwise_add as jagged_dense_elementwise_add
from jaxrec.ragged.elementwise import (
    jagged_dense_elementwise_add_jagged_output as jagged_dense_elementwise_add_jagged_output,
)
from jaxrec.ragged.elementwise import jagged_dense_elementwise_mul as jagged_dense_elementwise_mul
from jaxrec.ragged.equality import equal as equal
from jaxrec.ragged.hashing import hash_ids as hash_ids
from jaxrec.ragged.jagged import JaggedArray as JaggedArray
from jaxrec.ragged.keyed_array import KeyedArray as KeyedArray
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray as KeyedJaggedArray
from jaxrec.ragged.matmul import batched_dense_vec_jagged_2d_mul as batched_dense_vec_jagged_2d_mul
from jaxrec.ragged.matmul import jagged_dense_bmm as jagged_dense_bmm
from jaxrec.ragged.matmul import jagged_jagged_bmm as jagged_jagged_bmm
from jaxrec.ragged.offsets import complete_cumsum as complete_cumsum
from jaxrec.ragged.offsets import exclusive_cumsum as exclusive_cumsum
from jaxrec.ragged.offsets import inclusive_cumsum as inclusive_cumsum
from jaxrec.ragged.offsets import lengths_range as lengths_range
from jaxrec.ragged.offsets import offsets_range as offsets_range
from jaxrec.ragged.offsets import segment_ids as segment_ids
from jaxrec.ragged.packer import Packer as Packer
from jaxrec.ragged.packing import PackOptions as PackOptions
from jaxrec.ragged.permute import expand_into_jagged_permute as expand_into_jagged_permute
from jaxrec.ragged.permute import invert_permute as invert_permute
from jaxrec.ragged.permute import permute_sparse_data as permute_sparse_data
from jaxrec.ragged.segment_sum import segment_sum_csr as segment_sum_csr
from jaxrec.ragged.segments import (
    jagged_1d_to_truncated_values as jagged_1d_to_truncated_values,
)
from jaxrec.ragged.segments import jagged_slice as jagged_slice
from jaxrec.ragged.segments import pack_segments as pack_segments
from jaxrec.ragged.segments import segment_mask as segment_mask
from jaxrec.ragged.segments import unpack_segments as unpack_segments
from jaxrec.ragged.select import jagged_index_select as jagged_index_select
from jaxrec.ragged.select import keyed_jagged_index_select as keyed_jagged_index_select
from jaxrec.ragged.softmax import jagged_softmax as jagged_softmax
from jaxrec.ragged.unique import UniqueIndices as UniqueIndices
from jaxrec.ragged.unique import jagged_unique_indices as jagged_unique_indices
from jaxrec.ragged.validation import validate as validate
from jaxrec.ragged.wide_ids import WideIds as WideIds
from jaxrec.ragged.wide_ids import join_int64 as join_int64
from jaxrec.ragged.wide_ids import split_int64 as split_int64
