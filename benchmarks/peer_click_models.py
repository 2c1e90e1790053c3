"""Times one training step of TorchRec's SimpleDeepFMNN or DLRM_DCN.

As `benchmarks.click_models` times jaxrec's. Needs an environment with torch, torchrec and
fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_click_models.py [--model dcn_v2] [--batch 2048] [--threads 2]
"""

import logging

logging.disable(logging.WARNING)

import peer_click_shapes as shapes  # noqa: E402
import torch  # noqa: E402
import torchrec  # noqa: E402
from torchrec.models.deepfm import SimpleDeepFMNN  # noqa: E402
from torchrec.models.dlrm import DLRM_DCN  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402

OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def make_model(options):
    tables = [
        EmbeddingBagConfig(
            name=f"t{key}", embedding_dim=shapes.DIM, num_embeddings=rows, feature_names=[key]
        )
        for key, rows in zip(shapes.KEYS, shapes.row_counts(options), strict=True)
    ]
    embeddings = FusedEmbeddingBagCollection(
        tables=tables,
        optimizer_type=OPTIMIZERS[options.optimizer],
        optimizer_kwargs={"lr": shapes.RATE},
        device=torch.device("cpu"),
    )
    if options.model == "deepfm":
        return SimpleDeepFMNN(shapes.NUM_DENSE, embeddings, shapes.HIDDEN, shapes.HIDDEN)
    return DLRM_DCN(
        embeddings, shapes.NUM_DENSE, list(shapes.BOTTOM), list(shapes.TOP), shapes.CROSS_LAYERS,
        shapes.LOW_RANK,
    )  # fmt: skip


def main():
    options = shapes.make_parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    model = make_model(options)
    # The tables are updated in the backward pass.
    dense = [each for name, each in model.named_parameters() if "embedding_bag" not in name]
    optimizer = OPTIMIZERS[options.optimizer](dense, lr=shapes.RATE)
    # TorchRec's SimpleDeepFMNN ends with a sigmoid, its DLRM_DCN with logits.
    loss_of = (
        torch.nn.functional.binary_cross_entropy
        if options.model == "deepfm"
        else torch.nn.functional.binary_cross_entropy_with_logits
    )

    def step(dense, features, labels):
        optimizer.zero_grad()
        loss_of(model(dense, features)[:, 0], labels).backward()
        optimizer.step()

    offsets = torch.arange(len(shapes.KEYS) * options.batch + 1)
    batches = [
        (
            torch.from_numpy(dense),
            torchrec.KeyedJaggedTensor.from_offsets_sync(
                shapes.KEYS, torch.from_numpy(ids.reshape(-1)), offsets
            ),
            torch.from_numpy(labels),
        )
        for dense, ids, labels in shapes.draw_batches(options)
    ]
    shapes.time_steps(step, batches, options, "torchrec")


if __name__ == "__main__":
    main()
