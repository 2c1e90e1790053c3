"""Calls of the kernels, and whole training steps, as programs to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxrec
from benchmarks.gpu import step_models
from benchmarks.gpu.batches import PACKED, TRAINED, Shape
from benchmarks.gpu.bound import Work
from benchmarks.gpu.step_shapes import STEPS, ClickStep, Step
from benchmarks.shapes import read_shapes
from jaxrec import optim
from jaxrec.data.multi_hot import MLPERF_SIZES, MLPERF_TABLE_ROWS
from jaxrec.embed.kernels import Lookups, reference, use_kernels

OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "rowwise_adagrad": optim.rowwise_adagrad(0.1),
    "rowwise_adagrad_rounded": optim.rowwise_adagrad(0.1, stochastic_rounding=True),
    "adagrad": optim.adagrad(0.1),
    "adam": optim.adam(0.1),
    "partial_rowwise_adam": optim.partial_rowwise_adam(0.1),
    "lamb": optim.lamb(0.1),
    "ftrl": optim.ftrl(0.1),
    "adagrad_clip_norm": optim.adagrad(0.1, clip_norm=1.0),
    "rowwise_adagrad_clip_norm": optim.rowwise_adagrad(0.1, clip_norm=1.0),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile.

    Attributes:
        name: Name in the results.
        function: The function.
        arguments: Its arguments, trees of `jax.ShapeDtypeStruct`.
        tables: Shapes of tables and of their state, none of which may be copied.
        donate: Arguments whose memory it takes.
        temporaries: Most bytes of its temporaries; None: fewer than the tables'.
        work: Work of its kernel that reads or writes the tables; None: not estimated.
        refuse: Says why the backend does not take the call; None: it takes every call.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    tables: frozenset[tuple[int, ...]]
    donate: tuple[int, ...] = ()
    temporaries: int | None = None
    work: Work | None = None
    refuse: Callable[[], str | None] | None = None


def reference_calls() -> Iterator[Program]:
    """Yield calls of XLA's: where a kernel fails its trial, or an optimizer is not fused."""
    for dtype in ("float32", "bfloat16"):
        shape = Shape(f"D128 {dtype} L20", 4, 1_000_000, 128, 2048, 20, dtype=dtype)
        yield pooled_lookup(reference, shape)
        yield fused_update(reference, "adagrad_clip_norm", shape)


def calls(backend: ModuleType, quick: bool) -> Iterator[Program]:
    """Yield calls of each kernel at each width, row type and optimizer, and at named shapes."""
    for bag in (20,) if quick else (1, 20):
        shape = Shape(f"L{bag}", 4, 1_000_000, 128, 2048, bag, weighted=bag > 1)
        yield flatten_bags(backend, shape)
    for dtype in ("float32", "bfloat16"):
        for dim in (64, 128) if quick else (16, 64, 100, 128, 256, 1024):
            for bag in (20,) if quick else (1, 3, 20):
                shape = Shape(f"D{dim} {dtype} L{bag}", 4, 1_000_000, dim, 2048, bag, dtype=dtype)
                yield pooled_lookup(backend, shape)
            yield row_lookup(backend, shape)
            for name in ("rowwise_adagrad",) if quick else ("sgd", "rowwise_adagrad", "adam"):
                yield fused_update(backend, name, shape)
    if quick:
        return
    weighted = Shape("weighted", 4, 1_000_000, 128, 2048, 20, dtype="bfloat16", weighted=True)
    yield pooled_lookup(backend, weighted)
    for name in OPTIMIZERS:
        yield fused_update(backend, name, weighted)
    named = [
        Shape(each.name, each.T, each.V, each.D, each.B, each.L, dtype=each.dtype)
        for each in read_shapes()
    ]
    # Offsets of more than 2**31 elements take 64 bits.
    for shape in [*named, Shape("40M rows", 1, 40_000_000, 128, 8192, 20)]:
        yield pooled_lookup(backend, shape)
        yield fused_update(backend, "rowwise_adagrad", shape)


def packed_calls(backend: ModuleType, quick: bool) -> Iterator[Program]:
    """Yield calls on packed rows: of each format, and of more widths for some.

    Rows that are trained are updated, too, if the backend does that.
    """
    usual = ("int8", "trained int8", "int4")
    for name in usual if quick else PACKED:
        for dim in (64, 128) if quick or name not in usual else (16, 64, 100, 128, 256, 1024):
            for bag in (20,) if quick or dim not in (64, 128) else (1, 20):
                shape = Shape(f"D{dim} {name} L{bag}", 4, 1_000_000, dim, 2048, bag, packed=name)
                yield pooled_lookup(backend, shape)
            yield row_lookup(backend, shape)
            if name in TRAINED:
                yield fused_update(backend, "rowwise_adagrad", shape)
    if not quick:
        name = "D64 int8 weighted L20"
        shape = Shape(name, 4, 1_000_000, 64, 2048, 20, weighted=True, packed="int8")
        yield pooled_lookup(backend, shape)


def refusal(program: Program) -> str | None:
    """Return why a backend does not take a call; None: it does."""
    return None if program.refuse is None else program.refuse()


def pooled_lookup(backend: ModuleType, shape: Shape) -> Program:
    table, ids, lengths, weights = _batch(shape)

    def function(table: Any, ids: Any, lengths: Any, weights: Any) -> Any:
        return backend.pooled_lookup(table, ids, lengths, weights, shape.layout, shape.dtype)

    is_reference, is_triton = backend is reference, _name(backend) == "triton"
    return Program(
        f"{_name(backend)} pooled_lookup {shape.name}",
        function,
        (table, ids, lengths, weights),
        _shapes(table),
        # Neither looked-up rows nor an unpacked table.
        temporaries=None if is_reference else _extents_bytes(shape),
        work=Work.of_pool(shape, table) if is_triton else None,
        refuse=_refuse(backend, "pooled_lookup", table=table),
    )


def flatten_bags(backend: ModuleType, shape: Shape) -> Program:
    arrays = _batch(shape)[1:]
    num_rows = shape.table_shape[0]

    def function(ids: Any, lengths: Any, weights: Any) -> Any:
        return backend.flatten_bags(ids, lengths, weights, shape.layout, num_rows)

    temporaries = _extents_bytes(shape)
    name = f"{_name(backend)} flatten_bags {shape.name}"
    return Program(name, function, arrays, frozenset(), temporaries=temporaries)


def row_lookup(backend: ModuleType, shape: Shape) -> Program:
    table, ids, _, _ = _batch(shape)
    return Program(
        f"{_name(backend)} row_lookup {shape.name}",
        backend.row_lookup,
        (table, ids),
        _shapes(table),
        temporaries=0,
        refuse=_refuse(backend, "row_lookup", table=table),
    )


def fused_update(backend: ModuleType, optimizer: str, shape: Shape) -> Program:
    table, ids, _, weights = _batch(shape)
    rule = OPTIMIZERS[optimizer]
    state = jax.eval_shape(lambda: rule.init(*shape.table_shape))
    gradients = jax.ShapeDtypeStruct((shape.layout.num_bags, shape.dim), shape.dtype)

    def function(table: Any, state: Any, lookups: Any, gradients: Any, step: Any) -> Any:
        return backend.fused_update(table, state, lookups, gradients, rule, step)

    is_estimated = _name(backend) == "triton" and shape.packed is None
    return Program(
        f"{_name(backend)} fused_update {optimizer} {shape.name}",
        function,
        (table, state, Lookups(ids, ids, weights), gradients, jax.ShapeDtypeStruct((), jnp.int32)),
        _shapes((table, state)),
        donate=(0, 1),
        work=Work.of_update(shape, state) if is_estimated else None,
        refuse=_refuse(backend, "fused_update", table=table, state=state, optimizer=rule),
    )


def steps(backends: Sequence[str], quick: bool) -> Iterator[Program]:
    """Yield training steps: of tables alone, by each implementation, and of whole models.

    The models are those that `benchmarks.gpu.dlrm` times, and MLPerf's with all their rows.
    """
    yield tables_step("reference")
    for backend in backends:
        names = backend, "reference"
        yield tables_step(*names)
        for step in STEPS.values():
            if not quick or step.batch < 65536:
                yield timed_step(step.cut(32_000_000_000), *names)
        if quick:
            continue
        for optimizer in ("sgd", "rowwise_adagrad", "rowwise_adagrad_clip_norm"):
            yield mlperf_step(optimizer, *names, is_dcn=False)
        yield mlperf_step("rowwise_adagrad", *names, is_dcn=True)


def timed_step(step: Step, *implementations: str) -> Program:
    """Return a step that `benchmarks.gpu.dlrm` times."""

    def make() -> Any:
        made = step_models.make(step)
        return made.model, made.optimizer

    train_step = step_models.train_step_of(step)

    def function(state: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        with use_kernels(*implementations):
            loss = train_step(model, optimizer, *batch)
        return loss, nnx.state((model, optimizer))

    graph, state = nnx.split(nnx.eval_shape(make))
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, step_models.batch_of(step, 0)))
    if isinstance(step, ClickStep):
        tables = {(sum(step.rows), step.dim), (sum(step.rows),)}
    else:
        tables = {(step.items, step.dim)}
    name = f"step {implementations[0]} {step.name}"
    is_sequence = not isinstance(step, ClickStep)
    return Program(
        name,
        function,
        (state, *batch),
        frozenset(tables),
        donate=(0,),
        # Attention takes more than the items.
        temporaries=2_000_000_000 if is_sequence else None,
    )


def tables_step(
    *implementations: str,
    tables: int = 32,
    rows: int = 1_000_000,
    batch: int = 8192,
    dim: int = 128,
) -> Program:
    """Return a step of tables of ``dim`` columns alone, with ``batch`` bags of 20 ids of each."""
    bag = 20

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            configs = _configs([rows] * tables, dim)
            optimizer = optim.rowwise_adagrad(0.01)
            self.embeddings = jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=rngs)
            self.over = nnx.Linear(tables * dim, 1, rngs=rngs)

        def __call__(self, dense: Any, features: Any) -> Any:
            return self.over(self.embeddings(features).values)[:, 0]

    shapes = frozenset([(tables * rows, dim), (tables * rows,)])
    name = f"step {implementations[0]} tables alone"
    return _training_step(name, Model, [bag] * tables, batch, shapes, implementations)


def mlperf_step(optimizer: str, *implementations: str, is_dcn: bool) -> Program:
    """Return a step of MLPerf's DLRM, with one id a bag, or of its DLRM-DCNv2, with 214 a sample.

    Both have 204 million rows of 128 columns; a step has 65,536 samples.
    """
    dim, rows = 128, sum(MLPERF_TABLE_ROWS)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        configs = _configs(MLPERF_TABLE_ROWS, dim)
        options: dict[str, Any] = {
            "num_dense": 13,
            "bottom_layer_sizes": (512, 256, dim),
            "top_layer_sizes": (1024, 1024, 512, 256, 1),
            "rngs": rngs,
        }
        tables = jaxrec.EmbeddingBagCollection(configs, optimizer=OPTIMIZERS[optimizer], rngs=rngs)
        if is_dcn:
            return jaxrec.nn.DLRM_DCN(tables, dcn_num_layers=3, dcn_low_rank_dim=512, **options)
        return jaxrec.nn.DLRM(tables, **options)

    shapes = frozenset([(rows, dim), (rows,)])
    name = f"step {implementations[0]} MLPerf {'DLRM-DCNv2' if is_dcn else 'DLRM'} {optimizer}"
    bags = MLPERF_SIZES if is_dcn else [1] * len(MLPERF_SIZES)
    return _training_step(name, make, bags, 65536, shapes, implementations)


def _configs(table_rows: Sequence[int], dim: int) -> list[jaxrec.EmbeddingBagConfig]:
    return [
        jaxrec.EmbeddingBagConfig(f"t{i}", rows, dim, feature_names=(f"f{i}",))
        for i, rows in enumerate(table_rows)
    ]


def _training_step(
    name: str,
    make_model: Callable[[nnx.Rngs], Any],
    bags: Sequence[int],
    batch: int,
    tables: frozenset[tuple[int, ...]],
    implementations: tuple[str, ...],
) -> Program:
    """Return a step of a model of dense features and of one feature for each size of a bag."""

    def make() -> Any:
        model = make_model(nnx.Rngs(0))
        return model, jaxrec.Optimizer(model, optax.sgd(0.01))

    def function(state: Any, dense: Any, features: Any, labels: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: Any) -> Any:
            return optax.sigmoid_binary_cross_entropy(model(dense, features), labels).mean()

        with use_kernels(*implementations):
            value, gradients = jaxrec.value_and_grad(loss)(model)
            optimizer.update(model, gradients)
        return value, nnx.state((model, optimizer))

    graph, state = nnx.split(nnx.eval_shape(make))
    features = jax.eval_shape(
        lambda: jaxrec.KeyedJaggedArray(
            jnp.zeros(sum(bags) * batch, jnp.int32),
            jnp.zeros(len(bags) * batch, jnp.int32),
            keys=tuple(f"f{i}" for i in range(len(bags))),
            capacities=tuple(bag * batch for bag in bags),
            strides=(batch,) * len(bags),
        )
    )
    dense = jax.ShapeDtypeStruct((batch, 13), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.float32)
    return Program(name, function, (state, dense, features, labels), tables, donate=(0,))


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _refuse(
    backend: ModuleType, primitive: str, **arguments: Any
) -> Callable[[], str | None] | None:
    """Return a function that asks a backend for its reason to refuse a call."""
    if not hasattr(backend, "refuse"):
        return None
    return lambda: backend.refuse(primitive, arguments)


def _shapes(tables: Any) -> frozenset[tuple[int, ...]]:
    return frozenset(x.shape for x in jax.tree.leaves(tables))


def _extents_bytes(shape: Shape) -> int:
    """Return an upper bound of the bytes of bags' extents and of the features' numbers."""
    return 8 * shape.layout.num_bags + 8192


def _batch(shape: Shape) -> tuple[Any, Any, Any, Any]:
    """Return the table, ids, lengths and weights of a shape."""
    return (
        jax.eval_shape(shape.table),
        jax.ShapeDtypeStruct((shape.num_ids,), jnp.int32),
        jax.ShapeDtypeStruct((shape.layout.num_bags,), jnp.int32),
        jax.ShapeDtypeStruct((shape.num_ids,), jnp.float32) if shape.weighted else None,
    )
