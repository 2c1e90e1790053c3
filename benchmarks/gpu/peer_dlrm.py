"""Times whole training steps of TorchRec and FBGEMM, as `benchmarks.gpu.dlrm` times jaxrec's.

    PEER_PYTHON -m benchmarks.gpu.peer_dlrm [--compiled] [--steps dlrm_kaggle_8192 ...]
    PEER_PYTHON -m benchmarks.gpu.peer_dlrm --dry-run     # on the CPU, small, to prove the script
    PEER_PYTHON -m benchmarks.gpu.peer_dlrm --losses      # losses of small steps

Needs torch, fbgemm-gpu and torchrec, and nothing of jaxrec or JAX. The click models are TorchRec's
own, with its `FusedEmbeddingBagCollection`; SASRec reads its items from FBGEMM's tables, as
TorchRec's `EmbeddingCollection` does, and attends by PyTorch's fused attention. ``--compiled``
gives the dense part to `torch.compile`, in a mode if one follows ("reduce-overhead" has CUDA
graphs); lookups stay as they are, as in TorchRec's own `DLRM.compile_dense_path`. The exit status
is 1 if a step failed.
"""

import argparse
import gc
import json
import logging
import math
import sys
import time

logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torchrec  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: E402
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: E402
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRM_DCN  # noqa: E402
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection  # noqa: E402

from benchmarks.gpu.step_shapes import (  # noqa: E402
    NUM_DENSE,
    PRECISIONS,
    STEPS,
    SequenceStep,
    chosen_steps,
    layer_gflop,
    parameter_values,
    table_values,
)

MODES = ("default", "reduce-overhead")
BATCHES = 4
ROUNDS = 10
PROFILED = 10
CALLS_AHEAD = 8
LAYER_NORM_EPS = 1e-6  # Flax's default


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", nargs="*", choices=STEPS, help="names of the steps; default all")
    parser.add_argument(
        "--compiled", nargs="?", const="default", choices=MODES, help="compile the dense part"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32")
    parser.add_argument("--table-gb", type=float, default=32.0, help="most GB of a model's tables")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no step begins")
    parser.add_argument("--dry-run", action="store_true", help="run small steps on the CPU")
    parser.add_argument("--losses", action="store_true", help="losses of small steps alone")
    options = parser.parse_args()
    end, failures = time.monotonic() + options.seconds, 0
    is_small = options.dry_run or options.losses
    device = torch.device("cpu" if is_small else "cuda")
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    implementation = "torchrec"
    if options.compiled:
        mode = "" if options.compiled == "default" else f", {options.compiled}"
        implementation += f" compiled{mode}"
    for step in chosen_steps(options.steps, options.table_gb, is_small=is_small):
        line = {"kind": "step", "implementation": implementation, "shape": step.name}
        if time.monotonic() > end:
            print(json.dumps(line | {"kind": "left out"}), flush=True)
            continue
        trained: Trained | None = None
        try:
            trained = Trained(step, device)
            line |= trained.losses() if options.losses else measure(trained, options)
            line |= trained.describe()
        except Exception as exception:
            failures += 1
            line |= {"exception": f"{type(exception).__name__}: {exception}"[:300]}
        print(json.dumps(line | {"precision": options.precision}), flush=True)
        del trained  # before the next one is made
        gc.collect()
        if not is_small:
            torch.cuda.empty_cache()
    sys.exit(failures > 0)


class Trained:
    """A model with its training step and its batches."""

    def __init__(self, step, device):
        self.step, self.device = step, device
        self.model = (
            SASRec(step, device) if isinstance(step, SequenceStep) else ClickModel(step, device)
        )
        dense = self.model.dense_parameters()
        if isinstance(step, SequenceStep):
            # One launch for all parameters, where the card has it.
            self.optimizer = torch.optim.Adam(dense, lr=1e-3, fused=device.type == "cuda")
        else:
            # As optax: the sums of squares begin at 0.1.
            self.optimizer = torch.optim.Adagrad(
                dense, lr=0.01, initial_accumulator_value=0.1, eps=1e-7
            )
        self.batches = [self.model.batch(step.draw(seed)) for seed in range(BATCHES)]
        self.position = 0

    def __call__(self):
        self.position += 1
        self.optimizer.zero_grad()
        loss = self.model(*self.batches[self.position % BATCHES])
        loss.backward()  # updates the tables, too
        self.optimizer.step()
        return loss

    def losses(self):
        """Return the losses of three steps from fixed parameters."""
        with torch.no_grad():
            for number, parameter in enumerate(self.model.dense_parameters()):
                values = parameter_values(number, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values))
            for number, table in enumerate(self.model.tables()):
                table.copy_(torch.from_numpy(table_values(number, tuple(table.shape))))
        self.position = -1
        return {"losses": [float(self().detach()) for _ in range(3)]}

    def describe(self):
        """Return the size of the model, to compare it with jaxrec's."""
        shapes = [tuple(parameter.shape) for parameter in self.model.dense_parameters()]
        on_card = self.device.type == "cuda"
        return {
            "card": torch.cuda.get_device_name(0) if on_card else "cpu",
            "made_with": f"torch {torch.__version__}, torchrec {torchrec.__version__}",
            "parameters": sum(map(math.prod, shapes)),
            "layer_gflop": layer_gflop(self.step, shapes),
            "table_gb": sum(4 * table.numel() for table in self.model.tables()) / 1e9,
        }


class ClickModel(nn.Module):
    """TorchRec's DLRM or DLRM_DCN, and its loss."""

    def __init__(self, step, device):
        super().__init__()
        self.device, self.step = device, step
        self.keys = [f"f{i}" for i in range(len(step.rows))]
        tables = FusedEmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=f"t_{key}",
                    embedding_dim=step.dim,
                    num_embeddings=rows,
                    feature_names=[key],
                )
                for key, rows in zip(self.keys, step.rows, strict=True)
            ],
            optimizer_type=torchrec.optim.RowWiseAdagrad,
            optimizer_kwargs={"lr": 0.01},
            device=device,
        )
        sizes = tables, NUM_DENSE, list(step.bottom), list(step.top)
        if step.cross_layers:
            self.dlrm = DLRM_DCN(*sizes, step.cross_layers, step.cross_rank)
        else:
            self.dlrm = DLRM(*sizes)
        for part in (self.dlrm.dense_arch, self.dlrm.inter_arch, self.dlrm.over_arch):
            part.to(device)
        self.fused = tables

    def forward(self, dense, features, labels):
        logits = self.dlrm(dense, features).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, labels)

    def compile(self, how):
        dlrm = self.dlrm
        dlrm.dense_arch = torch.compile(dlrm.dense_arch, **how)
        dlrm.inter_arch = torch.compile(dlrm.inter_arch, **how)
        dlrm.over_arch = torch.compile(dlrm.over_arch, **how)

    def dense_parameters(self):
        parts = self.dlrm.dense_arch, self.dlrm.inter_arch, self.dlrm.over_arch
        return [parameter for part in parts for parameter in part.parameters()]

    def tables(self):
        return [module.weight for module in self.fused.embedding_bags.values()]

    def batch(self, drawn):
        dense, ids, labels = (torch.from_numpy(array) for array in drawn)
        lengths = np.repeat(np.array(self.step.bags, np.int32), self.step.batch)
        features = torchrec.KeyedJaggedTensor.from_lengths_sync(
            self.keys, ids, torch.from_numpy(lengths)
        )
        return dense.to(self.device), features.to(self.device), labels.to(self.device)


class SASRec(nn.Module):
    """SASRec over sequences of one length, and the softmax over sampled items."""

    def __init__(self, step, device):
        super().__init__()
        self.device, self.step = device, step
        on_cpu = device.type == "cpu"
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.items = SplitTableBatchedEmbeddingBagsCodegen(
            [(step.items, step.dim, location, compute)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            pooling_mode=PoolingMode.NONE,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=device,
        )
        for table in self.items.split_embedding_weights():
            table.data.uniform_(-0.01, 0.01)
        self.encoder = Encoder(step).to(device)

    def forward(self, ids, offsets, positives, negatives):
        step = self.step
        rows = self.items(ids, offsets)
        history, of_next, of_negatives = rows.split(
            [step.batch * step.length] * 2 + [step.negatives]
        )
        return self.encoder(history, of_next, of_negatives, positives, negatives)

    def compile(self, how):
        self.encoder = torch.compile(self.encoder, **how)

    def dense_parameters(self):
        return list(self.encoder.parameters())

    def tables(self):
        return self.items.split_embedding_weights()

    def batch(self, drawn):
        """Return all ids, offsets of bags of one id, the next items and the negatives."""
        _, of_next, negatives = drawn
        ids = torch.from_numpy(np.concatenate(drawn)).long().to(self.device)
        offsets = torch.arange(ids.numel() + 1, device=self.device)
        return ids, offsets, *(torch.from_numpy(x).to(self.device) for x in (of_next, negatives))


class Encoder(nn.Module):
    """The dense part of SASRec, and its loss."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.positions = nn.Parameter(torch.randn(step.length, step.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(step) for _ in range(step.blocks))
        self.norm = nn.LayerNorm(step.dim, eps=LAYER_NORM_EPS)

    def forward(self, history, of_next, of_negatives, positives, negatives):
        step = self.step
        states = history.view(step.batch, step.length, step.dim) * step.dim**0.5 + self.positions
        for block in self.blocks:
            states = block(states)
        states = self.norm(states).view(-1, step.dim)
        of_positive = (states * of_next).sum(1, keepdim=True)
        scores = states @ of_negatives.T
        scores = scores.masked_fill(positives[:, None] == negatives[None], -math.inf)
        scores = torch.cat([of_positive, scores], 1)
        return (scores.logsumexp(1) - of_positive[:, 0]).mean()


class Block(nn.Module):
    """Causal attention and two dense layers, each after a layer norm."""

    def __init__(self, step):
        super().__init__()
        self.heads = step.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(step.dim, step.dim) for _ in range(4)
        )
        self.attention_norm, self.dense_norm = (
            nn.LayerNorm(step.dim, eps=LAYER_NORM_EPS) for _ in range(2)
        )
        self.hidden, self.last = (nn.Linear(step.dim, step.dim) for _ in range(2))

    def forward(self, states):
        batch, length, dim = states.shape
        normed = self.attention_norm(states)
        query, key, value = (
            layer(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return states + self.last(functional.relu(self.hidden(self.dense_norm(states))))


def measure(trained, options):
    """Return the times of a step, and the peak of memory."""
    if options.compiled:
        # On the CPU this proves the graph alone, without a compiler for C++.
        how = {"backend": "aot_eager"} if options.dry_run else {"mode": options.compiled}
        trained.model.compile(how)
    if options.dry_run:
        trained()
        start = time.perf_counter()
        trained()
        return {"ms": [(time.perf_counter() - start) * 1e3] * 2}
    for _ in range(BATCHES):
        trained()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    figures = {"ms": timed(trained), "host_ms": host_ms(trained)}
    figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return figures | kernels(trained)


def timed(call):
    """Return the minimum and the median over rounds of a call's milliseconds."""
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = int(min(max(0.05 / (time.perf_counter() - start), 1), 200))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return [min(times), float(np.median(times))]


def host_ms(call):
    """Return the milliseconds after which the host has launched a call: the fastest of rounds."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS_AHEAD):
            call()
        times.append((time.perf_counter() - start) / CALLS_AHEAD * 1e3)
    torch.cuda.synchronize()
    return min(times)


def kernels(call):
    """Return the milliseconds and the number of the GPU's kernels, copies and fills in a call."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    is_on_card = torch.autograd.DeviceType.CUDA
    events = [
        each
        for each in profile.events()
        if each.device_type == is_on_card and not getattr(each, "is_user_annotation", False)
    ]
    return {
        "device_ms": sum(each.time_range.elapsed_us() for each in events) / PROFILED / 1e3,
        "launches": round(len(events) / PROFILED),
    }


if __name__ == "__main__":
    main()
