"""Two processes, each with samples of its own, report the values of all samples."""

from __future__ import annotations

import socket
import subprocess
import sys

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np

process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrec.metrics import AUC, MetricGroup, NormalizedEntropy, Task, merge_over_processes

group = MetricGroup(
    tasks=(Task(name="click", prediction="p", label="y"),),
    metrics={"ne": NormalizedEntropy(window=32), "auc": AUC(window=64)},
)
rng = np.random.default_rng(0)
batches = [
    {"p": rng.random(16, np.float32), "y": (rng.random(16) < 0.5).astype(np.float32)}
    for _ in range(4)
]
mine = slice(8 * process, 8 * process + 8)
update = jax.jit(group.update)
alone = group.init()
for batch in batches:
    alone = update(alone, batch)
expected = group.compute(alone)

# A state for each process, over samples of its own.
own = group.init()
for batch in batches:
    own = update(own, {name: x[mine] for name, x in batch.items()})
merged = group.compute(merge_over_processes(group, own))

# One state over a mesh of both processes' devices.
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
step = jax.jit(group.update, out_shardings=whole)
from_local = jax.make_array_from_process_local_data
state = jax.tree.map(lambda x: from_local(whole, np.asarray(x)), group.init())
for batch in batches:
    state = step(state, {name: from_local(split, x[mine]) for name, x in batch.items()})
over_mesh = group.compute(state)

for name, value in expected.items():
    for got in (merged[name], over_mesh[name]):
        assert abs(got - value) < 1e-6, (name, got, value)
print("same values")
"""


def test_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(process), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in outputs:
        assert out.endswith("same values\n"), err
