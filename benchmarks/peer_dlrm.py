"""Times one training step of TorchRec's DLRM, as `benchmarks.dlrm` times jaxrec's.

Needs an environment with torch, torchrec and fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_dlrm.py [--batch 2048] [--threads 2] [--steps 40]
"""

import argparse
import json
import logging
import time

logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torchrec  # noqa: E402
from torchrec.datasets.utils import Batch  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRMTrain  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402

# Row counts of the Criteo Kaggle data set.
ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
KEYS = [f"c{i}" for i in range(26)]


def make_model():
    tables = [
        EmbeddingBagConfig(
            name=f"t{key}", embedding_dim=16, num_embeddings=rows, feature_names=[key]
        )
        for key, rows in zip(KEYS, ROWS, strict=True)
    ]
    embeddings = FusedEmbeddingBagCollection(
        tables=tables,
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": 0.01},
        device=torch.device("cpu"),
    )
    return DLRMTrain(DLRM(embeddings, 13, [512, 256, 64, 16], [512, 256, 1]))


def make_batch(rng, size):
    ids = [np.minimum(rows ** rng.random(size) - 1, rows - 1) for rows in ROWS]
    features = torchrec.KeyedJaggedTensor.from_offsets_sync(
        KEYS, torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.arange(26 * size + 1)
    )
    dense = torch.from_numpy(rng.standard_normal((size, 13), dtype=np.float32))
    return Batch(dense, features, torch.from_numpy(rng.integers(0, 2, size)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = make_model()
    # The tables are updated in the backward pass.
    dense = [each for name, each in model.named_parameters() if "embedding_bag" not in name]
    optimizer = torch.optim.Adagrad(dense, lr=0.01)
    rng = np.random.default_rng(0)
    batches = [make_batch(rng, arguments.batch) for _ in range(8)]
    times = []
    for i in range(arguments.steps + 5):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss, _ = model(batches[i % 8])
        loss.backward()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    median = float(np.median(times[5:]))
    line = {"peer": "torchrec_dlrm", "batch": arguments.batch, "step_ms": [min(times[5:]), median]}
    print(json.dumps(line | {"samples_per_second": arguments.batch / median * 1e3}))


if __name__ == "__main__":
    main()
