"""Models and batches of whole training steps, the same for jaxrec and for its peers.

Needs NumPy alone: `benchmarks.gpu.peer_dlrm` imports it in an environment without JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

NUM_DENSE = 13
# Row counts of the Criteo Kaggle data set.
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
# MLPerf's DLRM-DCNv2 on Criteo 1TB: rows of each table, and ids per sample.
MLPERF_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000),
    *(590_152, 12_973, 108, 36),
)
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# Both sides compute matrix products in TF32, as PyTorch's "high" precision and XLA's default do.
PRECISIONS = ("tf32", "float32")


@dataclasses.dataclass(frozen=True)
class ClickStep:
    """A training step of a DLRM: row-wise Adagrad for the tables, Adagrad for the dense part.

    Attributes:
        name: Name in the results.
        batch: Number of samples.
        rows: Rows of each table; one feature reads each.
        bags: Ids of a sample, by feature.
        dim: Width of the tables.
        bottom: Layer sizes of the bottom MLP.
        top: Layer sizes of the top MLP.
        cross_layers: Layers of the cross network; 0: dot products of all pairs.
        cross_rank: Rank of the cross network.
    """

    name: str
    batch: int
    rows: tuple[int, ...]
    bags: tuple[int, ...]
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    cross_layers: int = 0
    cross_rank: int = 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables, in float32, without the optimizer's state."""
        return 4 * self.dim * sum(self.rows)

    def cut(self, table_bytes: int) -> ClickStep:
        """Return the step with its largest tables cut, so that all tables fit some bytes."""
        low, high = 1, max(self.rows)
        while low < high:  # The largest bound on rows that fits.
            middle = (low + high + 1) // 2
            fits = 4 * self.dim * sum(min(rows, middle) for rows in self.rows) <= table_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return dataclasses.replace(self, rows=tuple(min(rows, low) for rows in self.rows))

    def small(self) -> ClickStep:
        """Return the step with few rows and samples; the dense layers stay."""
        rows = tuple(min(rows, 100) for rows in self.rows)
        bags = tuple(min(bag, 4) for bag in self.bags)
        return dataclasses.replace(self, batch=16, rows=rows, bags=bags)

    def draw(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a batch: dense features, ids feature by feature, and labels.

        Ids follow a power law: ``floor(rows**u)`` of uniform ``u``, which is log-uniform.

        Returns:
            Dense features, float32 ``[batch, 13]``; ids, int32 ``[batch * sum(bags)]``; labels of 0
            and 1, float32 ``[batch]``.
        """
        rng = np.random.default_rng(seed)
        ids = [
            np.minimum(rows ** rng.random(self.batch * bag, np.float32), rows) - 1
            for rows, bag in zip(self.rows, self.bags, strict=True)
        ]
        dense = rng.standard_normal((self.batch, NUM_DENSE), np.float32)
        labels = rng.integers(0, 2, self.batch).astype(np.float32)
        return dense, np.concatenate(ids).astype(np.int32), labels


@dataclasses.dataclass(frozen=True)
class SequenceStep:
    """A training step of SASRec by a softmax over sampled items.

    Row-wise Adagrad for the items, Adam for the dense part.

    Attributes:
        name: Name in the results.
        batch: Number of sequences.
        length: Items of each sequence.
        items: Rows of the item table.
        dim: Width of the table and of the states.
        heads: Attention heads.
        blocks: Number of blocks.
        negatives: Sampled items, which all positions of the batch share.
    """

    name: str
    batch: int
    length: int
    items: int
    dim: int
    heads: int
    blocks: int
    negatives: int

    @property
    def table_bytes(self) -> int:
        """Bytes of the item table, in float32, without the optimizer's state."""
        return 4 * self.dim * self.items

    def cut(self, table_bytes: int) -> SequenceStep:
        """Return the step with its table cut to some bytes."""
        items = min(self.items, max(table_bytes // (4 * self.dim), 1))
        return dataclasses.replace(self, items=items)

    def small(self) -> SequenceStep:
        """Return the step with few items and sequences; the layers stay."""
        return dataclasses.replace(self, batch=4, items=100, negatives=16)

    def draw(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return histories, next items and negatives of a batch.

        Returns:
            int32 arrays: histories and next items, ``[batch * length]``; negatives,
            ``[negatives]``.
        """
        rng = np.random.default_rng(seed)
        drawn = self.items ** rng.random((self.batch, self.length + 1), np.float32)
        items = (np.minimum(drawn, self.items) - 1).astype(np.int32)
        negatives = rng.integers(0, self.items, self.negatives, np.int32)
        return items[:, :-1].reshape(-1), items[:, 1:].reshape(-1), negatives


Step = ClickStep | SequenceStep


def parameter_values(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return fixed values of a dense parameter, by its number and its shape in PyTorch."""
    values = np.random.default_rng(number).standard_normal(shape, np.float32)
    return values / np.sqrt(shape[-1]).astype(np.float32) if len(shape) > 1 else values * 0.1


def table_values(number: int, shape: tuple[int, int]) -> np.ndarray:
    """Return fixed values of a table, by its number."""
    return np.random.default_rng(1000 + number).standard_normal(shape, np.float32) * 0.1


def layer_gflop(step: Step, shapes: list[tuple[int, ...]]) -> float:
    """Return the GFLOP of the dense layers in a forward pass, by the shapes of their matrices.

    Interactions and attention, which have no parameters, do not count. The loss of a sequence
    model does: it multiplies each state with each negative.
    """
    matrices = [shape for shape in shapes if len(shape) == 2]
    if isinstance(step, SequenceStep):
        # The first is the table of positions, which is read, not multiplied.
        matrices = [*matrices[1:], (step.dim, step.negatives)]
        return 2e-9 * step.batch * step.length * sum(map(math.prod, matrices))
    return 2e-9 * step.batch * sum(map(math.prod, matrices))


def _kaggle(batch: int) -> ClickStep:
    bags = (1,) * len(KAGGLE_ROWS)
    name = f"dlrm_kaggle_{batch}"
    return ClickStep(name, batch, KAGGLE_ROWS, bags, 16, (512, 256, 64, 16), (512, 256, 1))


def _dcnv2(batch: int) -> ClickStep:
    top = (1024, 1024, 512, 256, 1)
    return ClickStep(
        f"dlrm_dcnv2_{batch}",
        batch,
        MLPERF_ROWS,
        MLPERF_BAGS,
        128,
        (512, 256, 128),
        top,
        cross_layers=3,
        cross_rank=512,
    )


# In the order in which they are timed: what a run of four minutes must have comes first.
STEPS: dict[str, Step] = {
    step.name: step
    for step in (
        _kaggle(8192),
        _dcnv2(8192),
        SequenceStep(
            "sasrec_512x200", 512, 200, 1_000_000, dim=64, heads=1, blocks=2, negatives=512
        ),
        _kaggle(65536),
        _dcnv2(65536),
    )
}


def chosen_steps(names: Sequence[str] | None, table_gb: float, *, is_small: bool) -> list[Step]:
    """Return the steps to run, by default all.

    Args:
        names: Names of steps; None or none: all.
        table_gb: Most GB of a model's tables, without the optimizer's state.
        is_small: Whether models and batches are small, for a dry run. Each model then runs once.
    """
    steps = [STEPS[name] for name in names or STEPS]
    if not is_small:
        return [step.cut(int(table_gb * 1e9)) for step in steps]
    # Steps that differ in their batches alone are the same when small.
    small: dict[Step, Step] = {}
    for step in steps:
        small.setdefault(dataclasses.replace(step.small(), name=""), step.small())
    return list(small.values())
