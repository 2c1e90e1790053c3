"""Trains TorchRec's DLRM on the batches that `benchmarks.score` wrote, and writes its results.

Needs an environment with torch, torchrec and fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_score.py DIRECTORY
"""

import json
import logging
import pathlib
import sys
import time

logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torchrec  # noqa: E402
from torchrec.models.dlrm import DLRM  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402


def read_batches(path, keys):
    """Return the dense features, the ids and the labels of each batch."""
    with np.load(path) as arrays:
        parts = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    sizes = parts["sizes"].tolist()
    return list(
        zip(
            parts["dense"].split(sizes),
            [
                torchrec.KeyedJaggedTensor.from_lengths_sync(keys, ids, lengths)
                for ids, lengths in zip(
                    parts["ids"].split(parts["ids_of_batch"].tolist()),
                    parts["lengths"].split([size * len(keys) for size in sizes]),
                    strict=True,
                )
            ],
            parts["labels"].split(sizes),
            strict=True,
        )
    )


def make_model(settings, num_dense):
    tables = [
        EmbeddingBagConfig(
            name=f"t_{table['name']}",
            embedding_dim=settings["dim"],
            num_embeddings=table["rows"],
            feature_names=[table["name"]],
            pooling=PoolingType[table["pooling"].upper()],
        )
        for table in settings["tables"]
    ]
    embeddings = FusedEmbeddingBagCollection(
        tables=tables,
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"lr": settings["table_rate"]},
        device=torch.device("cpu"),
    )
    return DLRM(embeddings, num_dense, settings["bottom"], settings["top"]), embeddings


def main():
    directory = pathlib.Path(sys.argv[1])
    settings = json.loads((directory / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    keys = [table["name"] for table in settings["tables"]]
    batches = read_batches(directory / "training.npz", keys)
    held = read_batches(directory / "held_out.npz", keys)
    model, embeddings = make_model(settings, batches[0][0].shape[1])
    # The tables are updated in the backward pass.
    layers = [each for name, each in model.named_parameters() if "embedding_bag" not in name]
    optimizer = torch.optim.Adam(layers, lr=settings["rate"])
    of_tables = embeddings.fused_optimizer()
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits

    def step(number, dense, features, labels):
        left = 1 - number / len(batches)
        for group in optimizer.param_groups:
            group["lr"] = settings["rate"] * left
        for group in of_tables.param_groups:
            group["lr"] = settings["table_rate"] * left
        of_tables.step()  # takes the rate
        optimizer.zero_grad()
        loss_of(model(dense, features)[:, 0], labels).backward()
        optimizer.step()

    seconds, logits, spent, first_step = [], [], 0.0, 0.0
    for start in range(0, len(batches), settings["every"]):
        begun = time.perf_counter()
        for number, batch in enumerate(batches[start : start + settings["every"]], start):
            step(number, *batch)
            if number == 0:
                first_step = time.perf_counter() - begun
                begun = time.perf_counter()
        spent += time.perf_counter() - begun
        seconds.append(spent)
        with torch.no_grad():
            logits.append(torch.cat([model(dense, ids)[:, 0] for dense, ids, _ in held]).numpy())
    np.savez(
        directory / "results.npz",
        seconds=np.array(seconds),
        logits=np.stack(logits),
        first_step=np.array(first_step),
    )


if __name__ == "__main__":
    main()
