"""Random and damaged bodies, for the decoders of requests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from jaxrec.serve.http.bodies import ArrowDecoder, JsonDecoder
from jaxrec.serve.http.limits import RequestError
from jaxrec.serve.http.predictor import Predictor, Scores
from jaxrec.serve.http.ranker_predictor import RankerPredictor
from tests.serve.http.endpoint import stream

_VALUES = (
    0, 1, -1, 2, 1.5, -0.0, 1e300, 2**31, 2**63, -(2**63), 2**64, 10**30, True, None, "", "Ulm",
    "\u0000", "\U0001f600", [], {}, [None], [1, "x"], [[1]], ["Ulm"],
)  # fmt: skip


class Bodies:
    """Bodies that are nearly right.

    Args:
        columns: The columns of a right body.
        seed: Seed of the random choices.
    """

    def __init__(self, columns: dict[str, list[Any]], seed: int) -> None:
        self._columns, self.random = columns, random.Random(seed)
        self._text = json.dumps(columns).encode()
        self._stream = stream(pa.table(columns))

    def json_body(self) -> bytes:
        """Return a JSON body with some other bytes or some other values."""
        if self.random.random() < 0.5:
            return self.damaged(self._text)
        return json.dumps(self._changed()).encode()

    def arrow_body(self) -> bytes:
        """Return an Arrow body with some other bytes, or with columns of other types."""
        if self.random.random() < 0.8:
            return self.damaged(self._stream)
        columns = {}
        for name, values in self._changed().items():
            try:
                columns[name] = pa.array(values)
            except (pa.ArrowException, TypeError, OverflowError):
                columns[name] = pa.array(self._columns[name])
        length = min(map(len, columns.values()), default=0)
        return stream(pa.table({name: each[:length] for name, each in columns.items()}))

    def damaged(self, body: bytes) -> bytes:
        """Return a body with some bytes changed, inserted, repeated or cut off."""
        changed = bytearray(body)
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randrange(len(changed) + 1)
            choice = self.random.random()
            if choice < 0.6 and place < len(changed):
                changed[place] = self.random.choice((0, 1, 127, 255, self.random.randrange(256)))
            elif choice < 0.75:
                changed[place:place] = self.random.randbytes(self.random.randint(1, 8))
            elif choice < 0.9:
                del changed[place : place + self.random.randint(1, 8)]
            else:
                del changed[place:]
        return bytes(changed)

    def _changed(self) -> dict[str, Any]:
        columns: dict[str, Any] = {name: list(x) for name, x in self._columns.items()}
        for _ in range(self.random.randint(0, 3)):
            name = self.random.choice(list(columns))
            values = columns[name]
            choice = self.random.random()
            if choice < 0.7 and values:
                values[self.random.randrange(len(values))] = self.random.choice(_VALUES)
            elif choice < 0.8:
                values.append(self.random.choice(_VALUES))
            elif choice < 0.9 and len(columns) > 1:
                del columns[name]
            else:
                columns[name] = [self.random.choice(_VALUES) for _ in values]
        return columns


def outcome(
    predictor: Predictor | RankerPredictor, decode: Callable[[bytes], Any], body: bytes
) -> int:
    """Return the status that a body gets: 200, or that of a clear error.

    Raises:
        Exception: A body is neither answered nor refused.
    """
    try:
        payload = decode(body)
    except RequestError as error:
        result: Any = error
    else:
        (result,) = predictor.predict([payload])
    if isinstance(result, Scores):
        assert {len(each) for each in result.columns.values()} == {payload.num_samples}
        return 200
    assert result.message
    assert result.status in (400, 413)
    return result.status


def decoders(predictor: Predictor | RankerPredictor) -> tuple[JsonDecoder, ArrowDecoder]:
    """Return decoders of the bodies of a model."""
    return JsonDecoder(predictor.columns, 1000), ArrowDecoder(predictor.columns, 1000)
