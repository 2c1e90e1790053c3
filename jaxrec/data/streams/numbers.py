"""Numbers of JSON, which are 7, 7.0 and 7e0 alike, in columns of integers and of floats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jaxrec.data.column_types import is_list


class WholeNumbers:
    """Rewrites lines of JSON so that Arrow reads whole numbers of columns of integers.

    Arrow does not read ``7.0`` and ``7e0`` as integers. ``fractions`` has each column of integers
    in which a number with a fraction came, such as ``user.age``, and a type that holds both.
    Numbers from 2**53 on stay as they are, and Arrow refuses them: a float may not hold all their
    digits, and ids would become others.
    """

    def __init__(self, columns: pa.Schema) -> None:
        self._columns = pa.struct([*columns])
        self.fractions: dict[str, pa.DataType] = {}
        self._is_changed = False

    def __call__(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Rewrite payloads of lines; lines that are no JSON stay as they are."""
        return [b"\n".join(map(self._line, payload.split(b"\n"))) for payload in payloads]

    def _line(self, line: bytes) -> bytes:
        try:
            content = json.loads(line)
        except ValueError:
            return line
        self._is_changed = False
        whole = self._value(content, self._columns, "", pa.float64())
        return json.dumps(whole).encode() if self._is_changed else line

    def _value(self, value: Any, kind: pa.DataType, name: str, wide: pa.DataType) -> Any:
        """Return a value whose numbers are integers where a type has integers."""
        if isinstance(value, dict) and pa.types.is_struct(kind):
            fields = {field.name: field.type for field in kind}
            return {
                key: self._value(each, fields[key], f"{name}.{key}".lstrip("."), pa.float64())
                if key in fields
                else each
                for key, each in value.items()
            }
        if isinstance(value, list) and is_list(kind):
            return [self._value(each, kind.value_type, name, pa.list_(wide)) for each in value]
        if isinstance(value, float) and pa.types.is_integer(kind):
            if not value.is_integer():
                self.fractions[name] = wide
            elif abs(value) < 2**53:
                self._is_changed = True
                return int(value)
        return value
