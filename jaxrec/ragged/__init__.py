"""Ragged batches as padded arrays: the types, their operations, packing from host data."""

from jaxrec.ragged.jagged import JaggedArray as JaggedArray
from jaxrec.ragged.keyed_array import KeyedArray as KeyedArray
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray as KeyedJaggedArray
