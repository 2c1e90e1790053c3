"""Description of the encoder of raw columns, which C++ reads without Parquet and YAML."""

from __future__ import annotations

import msgspec


class DenseEncoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Encoding of a column of numbers.

    Attributes:
        name: The column.
        transform: As of `jaxrec.data.DenseColumn`.
        missing: As of `jaxrec.data.DenseColumn`.
        is_boolean: Whether its values are true and false.
    """

    name: str
    transform: str
    missing: str
    is_boolean: bool = False


class VocabularyFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files of a vocabulary of ``size`` values.

    Attributes:
        is_integer: Whether the values are integers, else strings of bytes.
        num_unknown: Number of rows for unknown values, before those of known ones.
        seed: Seed of the hashes.
        hashes: uint64 ``[size]`` hashes, ascending.
        places: int32 ``[size]``, position of each hash's value.
        values: int64 ``[size]`` integers, or uint8 ``[bytes]`` of all strings.
        offsets: int64 ``[size + 1]`` offsets of the strings; None: integers.
    """

    is_integer: bool
    num_unknown: int
    seed: int
    hashes: str
    places: str
    values: str
    offsets: str | None


class CategoricalEncoding(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Encoding of a column of strings or ids.

    Attributes:
        name: The column.
        encoding: "vocabulary", "hash", "ids", "modulo" or "frozen", as of
            `jaxrec.data.CategoricalColumn`.
        num_embeddings: Number of rows of the table.
        refuses_null: Whether a null is an error.
        is_list: Whether each sample has a list.
        vocabulary: Files of the vocabulary, if there is one.
        ids: File of the int64 ``[size]`` raw ids of encoding "frozen", ascending: the row of the
            first is 1, and row 0 is that of other ids.
        is_boolean: Whether its values are true and false.
        is_text: Whether the values of encodings "hash" and "frozen" are text, else integers; None:
            not known, as in models that earlier versions exported.
    """

    name: str
    encoding: str
    num_embeddings: int
    refuses_null: bool
    is_list: bool
    vocabulary: VocabularyFiles | None
    ids: str | None = None
    is_boolean: bool = False
    is_text: bool | None = None


class ColumnEncoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encoding of raw columns.

    Attributes:
        dense: The columns of numbers, in the order of the dense features.
        categorical: The other columns.
        moments: File of float64 ``[dense, 2]``, mean and standard deviation of each dense column.
    """

    dense: tuple[DenseEncoding, ...]
    categorical: tuple[CategoricalEncoding, ...]
    moments: str

    @property
    def files(self) -> list[str]:
        """Paths of all of its files."""
        files = [self.moments]
        for column in self.categorical:
            if (each := column.vocabulary) is not None:
                files += [each.hashes, each.places, each.values]
                files += [] if each.offsets is None else [each.offsets]
            files += [] if column.ids is None else [column.ids]
        return files
