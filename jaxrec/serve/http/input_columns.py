"""The columns of requests: their types in JSON and in Arrow, and their conversion to inputs."""

from __future__ import annotations

import abc
import dataclasses
import types
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

import pyarrow as pa

# What a table of columns is converted to: the request of a model or of a ranker.
Converted = TypeVar("Converted", covariant=True)

# "time" is text of ISO 8601.
Kind = Literal["number", "integer", "bool", "text", "text or integer", "time"]

_JSON: dict[Kind, Any] = {
    "number": float,
    "integer": int,
    "bool": bool,
    "text": str,
    "text or integer": int | str,
    "time": str,
}
_INT64 = range(-(2**63), 2**63)

# Up to this float64 has every integer; a larger float may not be the integer that was meant.
_MOST_WHOLE = 2.0**53


@dataclasses.dataclass(frozen=True)
class InputColumn:
    """A column of the requests that a model answers.

    With ``is_list`` a sample has a list of any length; with ``shape`` it has an array of that
    shape. Ids are below ``num_ids``. If ``arrow_type`` is None, a request's values choose the type.
    ``example`` has the values of two samples.
    """

    name: str
    kind: Kind
    is_list: bool = False
    shape: tuple[int, ...] = ()
    num_ids: int | None = None
    may_be_null: bool = False
    arrow_type: pa.DataType | None = None
    example: tuple[Any, ...] = ()

    def json_type(self, *, with_floats: bool = False) -> Any:
        """Return the column's type in a JSON body; ``with_floats`` allows floats for integers."""
        sample = _JSON[self.kind]
        if with_floats and self._takes_integers:
            sample = sample | float
        for _ in range(self.depth):
            # Not ``list[sample]``, which type checkers read as an annotation.
            sample = types.GenericAlias(list, (sample,))
        return types.GenericAlias(list, (sample | None if self.may_be_null else sample,))

    @property
    def _takes_integers(self) -> bool:
        return self.kind in ("integer", "text or integer")

    def whole(self, values: list[Any]) -> list[Any]:
        """Convert floats such as 3.0 among the values of a JSON body to integers."""

        def integer(value: Any, sample: int) -> Any:
            if isinstance(value, list):
                return [integer(each, sample) for each in value]
            if not isinstance(value, float):
                return value
            if not (abs(value) <= _MOST_WHOLE and value.is_integer()):
                raise ValueError(
                    f"column {self.name!r}, sample {sample}: expected an integer, got {value!r}"
                )
            return int(value)

        if not self._takes_integers:
            return values
        return [integer(value, sample) for sample, value in enumerate(values)]

    @property
    def depth(self) -> int:
        """Number of nested lists of a sample."""
        return len(self.shape) + self.is_list

    def as_arrow(self, values: list[Any]) -> pa.Array:
        """Return the values of a JSON body as an Arrow array."""
        kind = self.arrow_type
        if kind is None:
            kind = self._type_of(values)
        for _ in range(self.depth):
            kind = pa.list_(kind)
        try:
            return pa.array(values, kind)
        except (ValueError, TypeError, OverflowError) as error:
            # Arrow does not say which value is wrong. Looked for only after an error, since it is a
            # loop in Python.
            raise ValueError(self._problem(values) or f"column {self.name!r}: {error}") from None

    def describe(self) -> dict[str, Any]:
        """Return the column as the endpoint's ``/model`` shows it."""
        return {
            "name": self.name,
            "type": self.kind,
            "is_list": self.is_list,
            "shape": list(self.shape),
            "num_ids": self.num_ids,
            "may_be_null": self.may_be_null,
        }

    def _type_of(self, values: list[Any]) -> pa.DataType:
        """Return the Arrow type of the values of a JSON body: string, int64 or uint64."""
        flat = [each for value in values for each in (value if self.is_list else (value,)) or ()]
        first = next((each for each in flat if each is not None), None)
        if isinstance(first, str) or (first is None and self.kind != "integer"):
            return pa.string()
        largest = max((each for each in flat if isinstance(each, int)), default=0)
        return pa.int64() if largest in _INT64 else pa.uint64()

    def _problem(self, values: list[Any]) -> str:
        """Return a message that names the first sample with a wrong value; "" if there is none.

        A value is wrong if earlier values have another type, or if it is an integer of more than
        64 bits.
        """
        kinds: set[type] = set()
        for sample, value in enumerate(values):
            for each in (value if self.is_list else (value,)) or ():
                if isinstance(each, int) and each not in _INT64 and self.kind == "integer":
                    return f"column {self.name!r}, sample {sample}: {each} does not fit 64 bits"
                kinds |= {type(each)} - {type(None)}
                if len(kinds) > 1:
                    return (
                        f"column {self.name!r}, sample {sample}: {each!r} is of another type than "
                        "the values before it; give either text or integers"
                    )
        return ""


class InputColumns(abc.ABC, Generic[Converted]):
    """The columns that a model reads; `request` converts them to the model's inputs.

    `RawColumns` implements it for models with an encoder, `RankerColumns` for rankers, and
    `ArgumentColumns` for others.
    """

    def __init__(self, columns: Iterable[InputColumn]) -> None:
        self.columns = tuple(columns)
        self.names = tuple(column.name for column in self.columns)

    @abc.abstractmethod
    def request(self, table: pa.Table) -> Converted:
        """Return the samples of a table that has all of these columns.

        A ValueError or TypeError names the column and the sample whose value is wrong.
        """

    def table(self, parts: Sequence[Any]) -> pa.Table:
        """Concatenate the columns of several JSON bodies to a table."""
        arrays = []
        for column in self.columns:
            values = parts[0][column.name]
            if len(parts) > 1:
                values = [value for part in parts for value in part[column.name]]
            arrays.append(column.as_arrow(values))
        return pa.table(arrays, list(self.names))

    def example(self) -> dict[str, list[Any]]:
        """Return an example of a JSON body, with two samples."""
        return {column.name: list(column.example) for column in self.columns}
