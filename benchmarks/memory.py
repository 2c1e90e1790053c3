"""Memory of a training step over that of its tables.

Usage: python -m benchmarks.memory [--rows 2000000] [--dim 64] [--batch 4096] [--bag 4]
Prints one JSON line per row optimizer: bytes of the model's state (tables and optimizer), the most
that the compiled step holds at once, how far that is above the state and above the state and the
activations (ids looked up x dim x 4 bytes), and how often a table is copied (it must not be).
"""

from __future__ import annotations

import json

import tyro

import jaxrec
from benchmarks.training import Shape, compile_step, fused_step, table_copies, total_bytes

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "partial_rowwise_adam", "adam")


def main(shape: Shape) -> None:
    for name in OPTIMIZERS:
        state, step = fused_step(shape, getattr(jaxrec.optim, name)(0.01))
        compiled = compile_step(state, step, shape)
        memory = compiled.memory_analysis()
        peak = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        activations = shape.batch * shape.bag * shape.dim * 4
        print(
            json.dumps(
                {
                    "optimizer": name,
                    "state_bytes": total_bytes(state),
                    "peak_bytes": peak,
                    "activation_bytes": activations,
                    "peak_over_state": round(peak / total_bytes(state), 4),
                    "peak_over_state_and_activations": round(
                        peak / (total_bytes(state) + activations), 4
                    ),
                    "table_copies": len(table_copies(compiled, shape)),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Shape, description=__doc__))
