"""Semantic ids: short codes of items, such that similar items share their first codes.

Items of a generated catalogue lie in a tree: departments, their shelves, items of a shelf. Their
vectors are quantized level by level, by residual k-means and by an RQ-VAE. A last code tells items
of the same codes apart. The ids are written to Parquet and read back, and new items are appended
without moving old ones.

    python examples/semantic_ids.py
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

import numpy as np
import tyro

from jaxrec.nn.semantic_ids import RQVAE, Quantizer, ResidualKMeans, SemanticIds


@dataclasses.dataclass(frozen=True)
class Settings:
    departments: int = 16
    shelves: int = 16
    """Shelves of each department."""
    items: int = 20
    """Items of each shelf."""
    dim: int = 32
    codebook_size: int = 32
    steps: int = 600
    """Training steps of the RQ-VAE."""
    seed: int = 0


def catalogue(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of items, and the department of each."""
    rng = np.random.default_rng(settings.seed)
    sizes = (settings.departments, settings.shelves, settings.items)
    vectors = np.zeros(settings.dim)
    for level, spread in enumerate((4.0, 1.5, 0.5)):
        vectors = vectors[..., None, :] + spread * rng.standard_normal(
            (*sizes[: level + 1], settings.dim)
        )
    departments = np.repeat(np.arange(sizes[0]), sizes[1] * sizes[2])
    return vectors.reshape(-1, settings.dim).astype(np.float32), departments


def purity(codes: np.ndarray, departments: np.ndarray) -> float:
    """Share of items whose department is the most usual one of their first code."""
    counts = np.zeros((codes.max() + 1, departments.max() + 1), np.int64)
    np.add.at(counts, (codes, departments), 1)
    return counts.max(axis=1).sum() / len(codes)


def main(settings: Settings) -> dict[str, float]:
    vectors, departments = catalogue(settings)
    new = np.random.default_rng(1).permutation(len(vectors))[: len(vectors) // 10]
    is_old = np.ones(len(vectors), bool)
    is_old[new] = False
    quantizers: dict[str, Quantizer] = {
        "k-means": ResidualKMeans(3, settings.codebook_size, num_steps=15),
        "balanced k-means": ResidualKMeans(3, settings.codebook_size, num_steps=15, balanced=True),
        "RQ-VAE": RQVAE(
            3, settings.codebook_size, code_dim=16, hidden_sizes=(64,), num_steps=settings.steps
        ),
    }
    found = {}
    for name, quantizer in quantizers.items():
        quantizer.fit(vectors[is_old])
        codes = quantizer.encode(vectors[is_old])
        ids = SemanticIds.of(
            codes, sizes=quantizer.sizes, items=np.flatnonzero(is_old), last_size=256
        )
        error = (
            np.square(quantizer.decode(codes) - vectors[is_old]).sum()
            / np.square(vectors[is_old] - vectors[is_old].mean(axis=0)).sum()
        )
        found[name] = purity(codes[:, 0], departments[is_old])
        print(f"{name}: {ids.report()}")
        print(f"    squared error {error:.3f}, purity of the first code {found[name]:.3f}")
        path = pathlib.Path(tempfile.mkdtemp(), "ids.parquet")
        more = ids.append(quantizer.encode(vectors[new]), items=new)
        more.write(path)
        more = SemanticIds.read(path)
        assert (more.codes[: len(ids)] == ids.codes).all()
        item = int(new[0])
        print(f"    the new item {item} has the codes {more.codes[more.rows([item])[0]].tolist()}")
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
