"""Measures the memory and the time of quantizing a model, of a report, and of a swap of its tables.

Usage: python -m benchmarks.quantize_memory [--tables 4] [--rows 10000000] [--dim 64] [--dtype int4]
    [--prune 0.3]
Prints a JSON line: bytes of the float32 tables and of the quantized ones, the process's peak memory
(from the operating system) before and after quantization, after a quality report and after a swap
for the tables of the same model, and the seconds that each took.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """The model, and its format.

    Attributes:
        tables: Number of tables.
        rows: Rows of each.
        dim: Columns of each.
        dtype: Format of the quantized tables.
        prune: Share of the rows of each table that is pruned, by norm.
    """

    tables: int = 4
    rows: int = 10_000_000
    dim: int = 64
    dtype: str = "int4"
    prune: float | None = None


def main(options: Options) -> None:
    from flax import nnx

    import jaxrec

    configs = [
        jaxrec.EmbeddingBagConfig(f"t{i}", options.rows, options.dim, trainable=False)
        for i in range(options.tables)
    ]
    model = jaxrec.EmbeddingBagCollection(configs, rngs=nnx.Rngs(0))
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {f"t{i}": [[1, 2], [3]] for i in range(len(configs))}
    )
    expected = model(batch).values.block_until_ready()
    rules = None
    if options.prune is not None:
        rule = jaxrec.serve.by_norm(share=options.prune)
        rules = {config.name: rule for config in configs}
    before, start = peak_bytes(), time.perf_counter()
    used = time.process_time()
    small = jaxrec.serve.quantize(model, options.dtype, prune=rules)
    found = small(batch).values.block_until_ready()
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    store = small.tables.get_value()
    figures = {
        "tables": dataclasses.asdict(options),
        "float32_bytes": options.tables * options.rows * options.dim * 4,
        "quantized_bytes": sum(store.num_bytes(config.name) for config in configs),
        "peak_bytes_before": before,
        "peak_bytes_after": peak_bytes(),
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "largest_error_of_a_bag": float(abs(found - expected).max()),
    }
    start = time.perf_counter()
    report = jaxrec.serve.quality(model, small)
    figures["report_seconds"] = round(time.perf_counter() - start, 1)
    figures["peak_bytes_after_report"] = peak_bytes()
    figures["relative_rms_error"] = report.tables[0].relative_rms_error
    del store
    start = time.perf_counter()
    jaxrec.serve.swap_tables(small, model)
    figures["swap_seconds"] = round(time.perf_counter() - start, 1)
    figures["peak_bytes_after_swap"] = peak_bytes()
    start = time.perf_counter()
    for _ in range(1000):
        jaxrec.serve.snapshot(small)
    figures["snapshot_microseconds"] = round((time.perf_counter() - start) * 1e3, 1)
    print(json.dumps(figures), flush=True)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
