"""Attention with any lengths, mask and type equals its definition, on one device and on eight."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

from jaxrec.nn import hstu_attention, jagged_attention
from tests.fuzz import max_examples
from tests.nn import attention_oracle as oracle
from tests.nn.attention_oracle import Call, Mask

pytestmark = pytest.mark.usefixtures("compiled_fast")

ROWS, CAPACITY, HEADS, DIM, VALUE_DIM = 5, 48, 2, 4, 3
DISTANCES, BUCKETS = 7, 9
# Largest error, as a share of the largest element: each sum adds rounded products.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch for each device.

    Attributes:
        lengths: For each device, the lengths of its rows.
        masks: For each device, its mask; they differ in arrays alone.
        query_lengths: For each device, the number of queries of its rows; None: all.
    """

    lengths: list[tuple[int, ...]]
    masks: list[Mask]
    query_lengths: list[tuple[int, ...]] | None
    seed: int


@dataclasses.dataclass(frozen=True)
class Case:
    """Batches, and the options of a call: those of one compiled program.

    Attributes:
        batches: The batches.
        axes: Kind of the mesh's axes; None: one device without a mesh.
        may_be_native: Whether the process says that it has only one device.
    """

    batches: list[Batch]
    axes: AxisType | None
    may_be_native: bool
    is_softmax: bool
    dtype: str
    block_size: int
    alpha: float | None
    scale: str
    has_position_bias: bool
    has_time_bias: bool
    has_query_times: bool


@st.composite
def row_lengths(draw) -> tuple[int, ...]:
    """Lengths that fit the capacity; one row may take all that is left."""
    lengths, left = [], CAPACITY
    for _ in range(ROWS):
        kind = draw(st.sampled_from(["empty", "one", "few", "many", "rest"]))
        most = {"empty": 0, "one": 1, "few": 5, "many": 20, "rest": left}[kind]
        least = {"empty": 0, "one": 1, "few": 2, "many": 6, "rest": left}[kind]
        lengths.append(draw(st.integers(min(least, left), min(most, left))))
        left -= lengths[-1]
    return tuple(draw(st.permutations(lengths)))


@st.composite
def cases(draw) -> Case:
    axes = draw(st.sampled_from([None, None, AxisType.Auto, AxisType.Explicit]))
    devices = 1 if axes is None else 8
    causal = draw(st.booleans()) or draw(st.booleans())
    has_targets = draw(st.booleans())
    context = draw(st.sampled_from([0, 1, 3, "rows"]))
    window = draw(st.sampled_from([0, 1, 4, 11])) if causal else 0
    shared = {
        "causal": causal,
        "max_attention_length": window,
        "min_full_attention_length": draw(st.sampled_from([0, 1, 5])) if window else 0,
        "target_group_size": draw(st.sampled_from([1, 2, 3])) if has_targets else 1,
    }
    has_query_lengths = draw(st.integers(0, 3)) == 0

    def batch() -> Batch:
        lengths = [draw(row_lengths()) for _ in range(devices)]

        def counts(upper) -> list[tuple[int, ...]]:
            return [tuple(draw(st.integers(0, upper(n))) for n in rows) for rows in lengths]

        targets = counts(lambda n: n) if has_targets else [None] * devices
        contexts = counts(lambda n: 4) if context == "rows" else [context] * devices
        masks = [
            Mask(num_targets=t, contextual_length=c, **shared)
            for t, c in zip(targets, contexts, strict=True)
        ]
        query_lengths = counts(lambda n: n) if has_query_lengths else None
        return Batch(lengths, masks, query_lengths, draw(st.integers(0, 2**31)))

    is_softmax = draw(st.integers(0, 2)) == 0
    has_time_bias = draw(st.booleans()) and not is_softmax
    return Case(
        batches=[batch() for _ in range(2)],
        axes=axes,
        may_be_native=axes is None and draw(st.booleans()),
        is_softmax=is_softmax,
        dtype=draw(st.sampled_from(sorted(TOLERANCES))),
        block_size=draw(st.sampled_from([1, 4, 8, 64])),
        alpha=draw(st.sampled_from([None, 0.5])),
        scale="none" if is_softmax else draw(st.sampled_from(["none", "number", "queries"])),
        has_position_bias=draw(st.booleans()) and not is_softmax,
        has_time_bias=has_time_bias,
        has_query_times=has_time_bias and draw(st.booleans()),
    )


def places(batch: Batch, device: int) -> np.ndarray:
    """The elements of a device that are queries."""
    lengths = np.array(batch.lengths[device])
    counts = lengths if batch.query_lengths is None else np.array(batch.query_lengths[device])
    ends = np.cumsum(lengths)
    return np.concatenate([np.arange(e - n, e) for e, n in zip(ends, counts, strict=True)])


def fitted(arrays: list[np.ndarray], junk: float) -> np.ndarray:
    """``[devices, capacity, ...]`` with junk in padding."""
    out = np.full((len(arrays), CAPACITY, *arrays[0].shape[1:]), junk, arrays[0].dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out


def program(case: Case):
    """The compiled result and gradients of a case."""
    mask = case.batches[0].masks[0].arguments()
    options = {name: x for name, x in mask.items() if not isinstance(x, np.ndarray)}
    options["block_size"] = case.block_size
    if not case.is_softmax:
        options["alpha"] = case.alpha
        if case.scale == "number":
            options["scale"] = 0.3
    attend = jagged_attention if case.is_softmax else hstu_attention

    @jax.jit
    def both(inputs, tables, given, cotangent):
        def form(inputs, tables):
            return attend(**inputs, **tables, **given, **options)

        out, vjp = jax.vjp(form, inputs, tables)
        return out, *vjp(cotangent)

    return both


def run(case: Case, batch: Batch, both, calls: list[Call], cotangents, times) -> tuple:
    """The output and gradients of jaxrec, over the devices of the case."""
    devices = range(len(calls))
    of_queries = [places(batch, device) for device in devices]

    def typed(arrays):
        return fitted(arrays, np.nan).astype(case.dtype)

    inputs = {
        "query": typed([c.q[p] for c, p in zip(calls, of_queries, strict=True)]),
        "key": typed([c.k for c in calls]),
        "value": typed([c.v for c in calls]),
    }
    given = {"lengths": np.array(batch.lengths, np.int32)}
    if batch.query_lengths is not None:
        given["query_lengths"] = np.array(batch.query_lengths, np.int32)
    for name in ("num_targets", "contextual_length"):
        if isinstance(getattr(batch.masks[0], name), tuple):
            given[name] = np.array([getattr(m, name) for m in batch.masks], np.int32)
    if case.scale == "queries":
        scales = [c.scale[p] for c, p in zip(calls, of_queries, strict=True)]
        inputs["scale"] = fitted(scales, np.nan).astype(np.float32)
    if case.has_time_bias:
        given["timestamps"] = fitted([t[1] for t in times], 10**9)
        if case.has_query_times:
            queries = [t[0][p] for t, p in zip(times, of_queries, strict=True)]
            given["query_timestamps"] = fitted(queries, -(10**9))
    cotangent = typed([c[p] for c, p in zip(cotangents, of_queries, strict=True)])
    if case.axes is None:
        inputs, given, cotangent = jax.tree.map(lambda x: x[0], (inputs, given, cotangent))
    else:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(case.axes,))
        inputs, given, cotangent = jax.device_put(
            (inputs, given, cotangent), NamedSharding(mesh, jax.P("data"))
        )
    tables = {f"{name}_bias": calls[0].biases[name] for name in calls[0].biases}
    with pytest.MonkeyPatch.context() as patch:
        if case.may_be_native:
            patch.setattr(jax, "device_count", lambda: 1)
        out, of_inputs, of_tables = both(inputs, tables, given, cotangent)
    results = {"out": out, **of_inputs}
    if case.axes is None:
        results = {name: x[None] for name, x in results.items()}
    return {name: np.asarray(x, np.float64) for name, x in results.items()}, of_tables


@settings(max_examples=max_examples(4))
@given(cases())
def test_any_call(case):
    both = program(case)
    for batch in case.batches:
        check(case, batch, both)


def check(case: Case, batch: Batch, both) -> None:
    """Compare a batch's output and gradients with the definition's."""
    rng = np.random.default_rng(batch.seed)
    calls, cotangents, times, expected = [], [], [], []

    def normal(*shape):
        return np.asarray(jnp.asarray(rng.standard_normal(shape), case.dtype), np.float64)

    biases = {}
    if case.has_position_bias:
        biases["position"] = rng.standard_normal((DISTANCES, HEADS)).astype(np.float32)
    if case.has_time_bias:
        biases["time"] = rng.standard_normal((BUCKETS, HEADS)).astype(np.float32)
    for device, lengths in enumerate(batch.lengths):
        n = sum(lengths)
        keys = np.cumsum(rng.integers(0, 40, n)).astype(np.int32)
        queries = keys + rng.integers(0, 9, n).astype(np.int32) if case.has_query_times else keys
        times.append((queries, keys))
        if case.has_time_bias and n:
            sizes = np.maximum(np.abs(queries[:, None].astype(np.int64) - keys), 1)
            edges = np.log(sizes[sizes > 1]) / 0.301
            assume(np.abs(edges - np.round(edges)).min(initial=1) > 1e-4)
        scale = {"none": 1.0, "number": 0.3}.get(case.scale)
        if scale is None:
            scale = rng.standard_normal(n).astype(np.float32)
        call = Call(
            normal(n, HEADS, DIM), normal(n, HEADS, DIM), normal(n, HEADS, VALUE_DIM),
            np.array(lengths), batch.masks[device], case.alpha or 1.0, scale, biases, times[-1],
        )  # fmt: skip
        # Elements that are no queries have no output, so nothing comes back from them.
        cotangent = np.zeros((n, HEADS, VALUE_DIM))
        cotangent[places(batch, device)] = normal(len(places(batch, device)), HEADS, VALUE_DIM)
        attend = oracle.softmax if case.is_softmax else oracle.hstu
        calls.append(call)
        cotangents.append(cotangent)
        expected.append(attend(call, cotangent))
    found, of_tables = run(case, batch, both, calls, cotangents, times)

    tolerance = TOLERANCES[case.dtype]
    for device, (out, gradients) in enumerate(expected):
        rows = places(batch, device)
        wanted = {"out": out[rows], "query": gradients["q"][rows], "key": gradients["k"]}
        wanted["value"] = gradients["v"]
        if "scale" in found:
            wanted["scale"] = gradients["scale"][rows]
        for name, want in wanted.items():
            got = found[name][device]
            bound = tolerance * (1 + np.abs(want).max(initial=0))
            np.testing.assert_allclose(got[: len(want)], want, rtol=0, atol=bound, err_msg=name)
            assert not np.any(got[len(want) :]), f"{name} of padding"
    for name in biases:
        want = sum(gradients[name] for _, gradients in expected)
        bound = tolerance * (1 + np.abs(want).max())
        np.testing.assert_allclose(of_tables[f"{name}_bias"], want, rtol=0, atol=bound)
