"""Times TorchRec's MCHManagedCollisionModule as `benchmarks.tier ids` times jaxrec's id map.

Its other module, HashZchManagedCollisionModule, adds ids on GPUs alone. Needs an environment with
torch, torchrec and fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_ids.py [--resident N] [--batch N] [--rounds N]
"""

import argparse
import json
import logging
import statistics
import time

logging.disable(logging.WARNING)

import torch  # noqa: E402
from torchrec.modules.mc_modules import (  # noqa: E402
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor  # noqa: E402

LARGEST = 2**63 - 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resident", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(LARGEST, (options.resident,))
    module = MCHManagedCollisionModule(
        zch_size=options.resident + 1,  # the last slot is that of unknown ids
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=1,
    )
    module._mch_sorted_raw_ids[:-1] = ids.sort().values

    samples = [torch.randint(options.resident, (options.batch,)) for _ in range(options.rounds)]
    report("hits", options, times(module.eval(), [ids[sample] for sample in samples]))
    # Each of these steps sorts all ids. The first one also makes buffers.
    rounds = min(options.rounds, 3)
    batches = [torch.randint(LARGEST, (options.batch,)) for _ in range(rounds + 1)]
    report("misses", options, times(module.train(), batches)[1:])


def times(module, batches):
    """Seconds of processor time for each batch."""
    seconds = []
    for ids in batches:
        features = {"ids": JaggedTensor(values=ids, lengths=torch.ones_like(ids))}
        start = time.process_time()
        with torch.no_grad():
            module(features)
        seconds.append(time.process_time() - start)
    return seconds


def report(measure, options, seconds):
    line = {"peer": "torchrec_mch", "measure": measure}
    line |= {"resident": options.resident, "batch": options.batch}
    line |= {"ids_per_second": round(options.batch / statistics.median(seconds))}
    print(json.dumps(line), flush=True)


main()
