"""Trains TorchRec's DLRM on the files of `benchmarks.defaults`.

Usage: PEER_PYTHON benchmarks/peer_torchrec_run.py FOLDER [--seed 0] [--batch 512] [--epochs 1]
TorchRec has no default run: the sizes of layers and tables are those of `jaxrec train --model
dlrm`, the optimizers Adam and row-wise Adagrad, whose rates, by default those of TorchRec's
optimizers, stay constant. Columns of floats are standardized by the training rows, others are
numbered: values that occur once share a row with those that do not occur. Needs at least one column
of floats. One thread. Prints one JSON line, as `peer_trees.py` does. Needs an environment with
pyarrow, torch, torchrec and fbgemm-gpu-cpu.
"""

import argparse
import json
import logging
import pathlib
import time

logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import peer_trees  # noqa: E402
import torch  # noqa: E402
import torchrec  # noqa: E402
from torchrec.models.dlrm import DLRM  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402

DIM = 16


def prepare(values, categories):
    """Return dense features and row indices of both files, and the number of rows of each table."""
    dense, ids, rows = ([], []), ([], []), []
    for place, (train, test) in enumerate(zip(values[0].T, values[1].T, strict=True)):
        if place not in categories:
            mean, scale = np.nanmean(train), np.nanstd(train) or 1.0
            for part, column in zip(dense, (train, test), strict=True):
                part.append(np.nan_to_num((column - mean) / scale))
            continue
        known, counts = np.unique(train[train >= 0], return_counts=True)
        known = known[counts > 1]
        rows.append(len(known) + 1)
        for part, column in zip(ids, (train, test), strict=True):
            found = np.minimum(np.searchsorted(known, column), max(len(known) - 1, 0))
            part.append(np.where(known[found] == column, found + 1, 0) if len(known) else 0 * found)
    return (
        [np.stack(part, axis=1).astype(np.float32) for part in dense],
        [np.stack(part).astype(np.int64) for part in ids],
        rows,
    )


def make_model(rows, num_dense, rate):
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=DIM, num_embeddings=count, feature_names=[f"c{i}"]
        )
        for i, count in enumerate(rows)
    ]
    embeddings = FusedEmbeddingBagCollection(
        tables=tables,
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": rate},
        device=torch.device("cpu"),
    )
    return DLRM(embeddings, num_dense, [128, 64, DIM], [128, 64, 1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--table-rate", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    values, labels, categories = peer_trees.read(options.folder)
    start = time.process_time()
    dense, ids, rows = prepare(values, categories)
    model = make_model(rows, dense[0].shape[1], options.table_rate)
    own = [each for name, each in model.named_parameters() if "embedding_bag" not in name]
    optimizer = torch.optim.Adam(own, lr=options.rate)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    keys = [f"c{i}" for i in range(len(rows))]

    def logits(part, places):
        features = torchrec.KeyedJaggedTensor.from_offsets_sync(
            keys,
            torch.from_numpy(ids[part][:, places].reshape(-1)),
            torch.arange(len(keys) * len(places) + 1),
        )
        return model(torch.from_numpy(dense[part][places]), features)[:, 0]

    rng = np.random.default_rng(options.seed)
    for _ in range(options.epochs):
        order = rng.permutation(len(labels[0]))
        for first in range(0, len(order), options.batch):
            places = order[first : first + options.batch]
            optimizer.zero_grad()
            of_rows = torch.from_numpy(labels[0][places].astype(np.float32))
            loss_of(logits(0, places), of_rows).backward()
            optimizer.step()
    with torch.no_grad():
        parts = np.array_split(np.arange(len(labels[1])), max(1, len(labels[1]) // 8192))
        found = np.concatenate([torch.sigmoid(logits(1, x)).double().numpy() for x in parts])
    line = {
        "model": "torchrec dlrm",
        "seed": options.seed,
        "auc": peer_trees.auc(found, labels[1]),
        "log_loss": peer_trees.log_loss(found, labels[1]),
        "processor_seconds": round(time.process_time() - start, 1),
        "version": torchrec.__version__,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
