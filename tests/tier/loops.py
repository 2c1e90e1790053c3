"""Training loops over batches whose ids get rows."""

from __future__ import annotations

import time

import numpy as np

from jaxrec.tier import ahead
from jaxrec.tier.planning.tier import tier_of
from tests.tier import sums


def train(model, batches, *, place=None, look_ahead=2):
    optimizer = sums.make_optimizer(model)
    return [
        np.asarray(sums.step(model, optimizer, batch))
        for batch in ahead(model, batches, look_ahead, place=place)
    ]


def resident_rows(model) -> dict[int, list[float]]:
    """The row of each resident id."""
    ids, rows = tier_of(model).vocabularies[0].vocabulary.map.items()
    table = np.asarray(model.embeddings.table("item"))[rows]
    return dict(zip(ids.tolist(), table.tolist(), strict=True))


def assert_same(outputs, expected):
    for number, (found, wanted) in enumerate(zip(outputs, expected, strict=True), 1):
        np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=f"batch {number}")


def joined(numbers: tuple[int, ...]) -> str:
    return "_".join(map(str, numbers))


def wait_until_planned(tier, number: int) -> None:
    for _ in range(2000):
        if tier.order.last_planned >= number:
            return
        time.sleep(0.01)
    raise TimeoutError
