"""Times the authors' HSTU layers in PyTorch, as `benchmarks.ranker_stack` times jaxrec's.

Needs an environment with torch, fbgemm-gpu-cpu and triton, and a checkout of
meta-recsys/generative-recommenders.

Usage: PEER_PYTHON benchmarks/peer_ranker_stack.py CHECKOUT SHAPES.npz [--seconds 5] [--threads 2]
SHAPES.npz has the ``lengths`` of the rows, the greatest possible length ``longest``, ``heads``,
``dim`` and ``layers``. Prints a JSON line for each program: passes of the authors' attention, of
`scaled_dot_product_attention` on padded rows, and of the authors' layers.
"""

import argparse
import json
import sys
import time

import numpy as np
import torch


def programs(given):
    """Return a function for each program, and what it is differentiated by."""
    import fbgemm_gpu  # noqa: F401  (defines torch.ops.fbgemm)
    from generative_recommenders.common import HammerKernel
    from generative_recommenders.modules.stu import STULayer, STULayerConfig
    from generative_recommenders.ops.pytorch.pt_hstu_attention import pytorch_hstu_mha

    lengths = torch.from_numpy(given["lengths"].astype(np.int64))
    longest, heads, dim, layers = (
        int(given[name]) for name in ("longest", "heads", "dim", "layers")
    )
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    targets = torch.ones_like(lengths)
    tokens, columns = int(lengths.sum()), dim // heads

    def draw(*shape):
        return torch.randn(*shape, requires_grad=True)

    ragged = [draw(tokens, heads, columns) for _ in range(3)]
    padded = [draw(len(lengths), heads, longest, columns) for _ in range(3)]
    states = draw(tokens, dim)
    config = STULayerConfig(
        embedding_dim=dim,
        num_heads=heads,
        hidden_dim=columns,
        attention_dim=columns,
        output_dropout_ratio=0.0,
    )
    stack = torch.nn.ModuleList(STULayer(config) for _ in range(layers))
    for layer in stack:
        layer.set_hammer_kernel(HammerKernel.PYTORCH)

    def attention():
        return pytorch_hstu_mha(
            longest, columns**-0.5, *ragged, offsets, num_targets=targets, training=True
        )

    def padded_attention():
        return torch.nn.functional.scaled_dot_product_attention(*padded, is_causal=True)

    def all_layers():
        x = states
        for layer in stack:
            x = layer(
                x,
                x_lengths=lengths,
                x_offsets=offsets,
                max_seq_len=longest,
                num_targets=targets,
            )
        return x

    return {
        "attention": (attention, ragged),
        "padded scaled_dot_product_attention": (padded_attention, padded),
        "layers": (all_layers, [states, *stack.parameters()]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout")
    parser.add_argument("shapes")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, options.checkout)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for name, (forward, inputs) in programs(dict(np.load(options.shapes))).items():

        def both(forward=forward, inputs=inputs):
            for each in inputs:
                each.grad = None
            out = forward()
            (out * out.detach()).sum().backward()

        def alone(forward=forward):
            with torch.no_grad():
                forward()

        for passes, run in (("forward", alone), ("both", both)):
            run()
            times, end = [], time.perf_counter() + options.seconds
            while len(times) < 2 or time.perf_counter() < end:
                start, busy = time.perf_counter(), time.process_time()
                run()
                times.append((time.perf_counter() - start, time.process_time() - busy))
            ms, processor_ms = (1e3 * np.median(times, 0)).tolist()
            line = {"program": name, "passes": passes, "ms": ms, "processor_ms": processor_ms}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
