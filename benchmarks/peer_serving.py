"""Times TorchRec's DLRM with int8 tables, as TorchScript, as `benchmarks.serving` times jaxrec's.

Needs an environment with torch, torchrec and fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_serving.py REQUESTS.npz [--batches 1 64 1024] [--seconds 2]
                                              [--threads 2] [--callers 1] [--open-share 0.5]
REQUESTS.npz has ``dense`` [samples, dense features], ``ids`` [tables, samples], ``rows`` of the
tables, and the sizes ``dim``, ``bottom`` and ``top``.
"""

import argparse
import concurrent.futures
import json
import logging
import time
import warnings

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torchrec  # noqa: E402
from torchrec.inference.modules import quantize_inference_model  # noqa: E402
from torchrec.models.dlrm import DLRM  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig  # noqa: E402


def make_model(given):
    """Return the scripted model: quantized tables, float32 layers."""
    dim = int(given["dim"])
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=dim, num_embeddings=int(rows), feature_names=[f"c{i}"]
        )
        for i, rows in enumerate(given["rows"])
    ]
    embeddings = torchrec.EmbeddingBagCollection(tables, device=torch.device("cpu"))
    num_dense = given["dense"].shape[1]
    model = DLRM(embeddings, num_dense, given["bottom"].tolist(), given["top"].tolist())
    model = quantize_inference_model(model.eval())
    traced = torchrec.fx.symbolic_trace(
        model, leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]
    )
    return torch.jit.script(traced)


def make_requests(given, size):
    """Return the requests of one batch size."""
    keys = [f"c{i}" for i in range(len(given["rows"]))]
    requests = []
    for start in range(0, given["dense"].shape[0] - size + 1, size):
        part = slice(start, start + size)
        ids = torch.from_numpy(given["ids"][:, part].reshape(-1).astype(np.int32))
        lengths = torch.ones(len(keys) * size, dtype=torch.int32)
        dense = torch.from_numpy(given["dense"][part].copy())
        requests.append((dense, keys, ids, lengths))
    return requests


@torch.inference_mode()
def closed_loop(predict, requests, seconds):
    """Return the latencies of requests that wait for each other."""
    latencies, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(latencies) < 3:
        begin = time.perf_counter()
        predict(*requests[len(latencies) % len(requests)])
        latencies.append(time.perf_counter() - begin)
    return latencies


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("requests")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--open-share", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with np.load(options.requests) as file:
        given = dict(file)
    model = make_model(given)

    def predict(dense, keys, ids, lengths):
        # A request arrives as ids: making the batch of them is part of answering it.
        features = torchrec.KeyedJaggedTensor.from_lengths_sync(keys, ids, lengths)
        return torch.sigmoid(model(dense, features)).numpy()

    with torch.inference_mode():
        for size in options.batches:
            requests = make_requests(given, size)
            for i in range(50):
                predict(*requests[i % len(requests)])
            start = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(options.callers) as pool:
                loops = [
                    pool.submit(closed_loop, predict, requests, options.seconds)
                    for _ in range(options.callers)
                ]
                latencies = [latency for loop in loops for latency in loop.result()]
            elapsed = time.perf_counter() - start
            p50, p99 = np.percentile(latencies, (50, 99)) * 1e6
            line = {"batch": size, "threads": options.threads, "callers": options.callers}
            line |= {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
            line["samples_per_s"] = round(len(latencies) * size / elapsed)
            if options.open_share:
                rate = options.open_share * len(latencies) / elapsed
                latencies, start = [], time.perf_counter()
                for number in range(max(20, int(rate * options.seconds))):
                    due = start + number / rate
                    if (wait := due - time.perf_counter()) > 0:
                        time.sleep(wait)
                    predict(*requests[number % len(requests)])
                    latencies.append(time.perf_counter() - due)
                p50, p99 = np.percentile(latencies, (50, 99)) * 1e6
                line |= {"open_per_s": round(rate, 1)}
                line |= {"open_p50_us": round(p50, 1), "open_p99_us": round(p99, 1)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
