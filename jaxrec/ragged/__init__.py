"""Ragged batches as padded arrays: the types, their operations, packing from host data."""

from jaxrec.ragged.capacity import grown as grown
from jaxrec.ragged.capacity import rung as rung
from jaxrec.ragged.dense import dense_to_jagged as dense_to_jagged
from jaxrec.ragged.dense import jagged_to_padded_dense as jagged_to_padded_dense
from jaxrec.ragged.jagged import JaggedArray as JaggedArray
from jaxrec.ragged.keyed_array import KeyedArray as KeyedArray
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray as KeyedJaggedArray
from jaxrec.ragged.offsets import complete_cumsum as complete_cumsum
from jaxrec.ragged.offsets import exclusive_cumsum as exclusive_cumsum
from jaxrec.ragged.offsets import inclusive_cumsum as inclusive_cumsum
from jaxrec.ragged.offsets import lengths_range as lengths_range
from jaxrec.ragged.offsets import offsets_range as offsets_range
from jaxrec.ragged.offsets import segment_ids as segment_ids
from jaxrec.ragged.packing import PackOptions as PackOptions
from jaxrec.ragged.words import join_int64 as join_int64
from jaxrec.ragged.words import split_int64 as split_int64
