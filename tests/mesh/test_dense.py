"""A model whose dense part is sharded trains as one whose dense part is replicated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxrec
from jaxrec.embed.variables import PlacedVariable, dense_variables, variables
from jaxrec.mesh import MIN_SHARDED_SIZE, row_wise, shard_batch
from jaxrec.mesh.traffic import collectives
from jaxrec.train import compile_step
from tests.users_xla import AS_USERS_DO

DIM, WIDE, BATCH = 64, 1024, 32
DEVICES = 8
# The kernels that "fsdp" shards: 64 x 1024 and 1024 x 128; and the table of `nnx.Embed`.
SHARDED = {"first/kernel": DIM * WIDE, "second/kernel": WIDE * 128, "days/embedding": 4096 * 16}


class Ranker(nnx.Module):
    """Tables, a dense embedding beside them, and smooth layers of which two are large.

    `nnx.Embed` does not know how to lay out rows of ids over Explicit axes.
    """

    def __init__(self, has_days=True):
        rngs = nnx.Rngs(0)
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [jaxrec.EmbeddingBagConfig("user", 100, 48 if has_days else 64)],
            optimizer=jaxrec.optim.rowwise_adagrad(0.1),
            rngs=rngs,
        )
        self.days = nnx.Embed(4096, 16, rngs=rngs) if has_days else None
        self.first = nnx.Linear(DIM, WIDE, rngs=rngs)
        self.second = nnx.Linear(WIDE, 128, rngs=rngs)
        self.over = nnx.Linear(128, 1, rngs=rngs)

    def __call__(self, features, days):
        x = self.embeddings(features).values
        if self.days is not None:
            x = jnp.concatenate([x, self.days(days)], axis=1)
        return self.over(jnp.tanh(self.second(jnp.tanh(self.first(x)))))[:, 0]


def train_step(model, optimizer, features, days, labels):
    def loss_fn(model):
        return ((model(features, days) - labels) ** 2).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def draw_batch(seed):
    rng = np.random.default_rng(seed)
    features = jaxrec.KeyedJaggedArray.from_dense({"user": rng.integers(0, 100, (BATCH, 3))})
    labels = rng.normal(size=BATCH).astype(np.float32)
    return features, rng.integers(0, 4096, BATCH).astype(np.int32), labels


BATCHES = [draw_batch(seed) for seed in range(3)]
MESHES = {
    "one_axis": ((8,), ("data",), AxisType.Auto),
    "two_axes": ((2, 4), ("host", "device"), AxisType.Auto),
    "explicit": ((8,), ("data",), AxisType.Explicit),
}
BFLOAT16 = jaxrec.mesh.ExchangePrecision(dense="bfloat16")
PLAN = jaxrec.plan.ShardingPlan.from_dict({"user": row_wise()})


def mesh_of(name="one_axis"):
    shape, axes, kind = MESHES[name]
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))


def adam():
    return optax.adamw(1e-3, weight_decay=0.01)


def trained(mesh, *, optimizer_first=False, tx=adam, has_days=True, **options):
    """The model, its optimizer and its losses after some steps."""
    model = Ranker(has_days)
    optimizer = jaxrec.Optimizer(model, tx()) if optimizer_first else None
    model = jaxrec.shard(model, PLAN, mesh, **options)
    optimizer = jaxrec.Optimizer(model, tx()) if optimizer is None else optimizer
    step = nnx.jit(train_step, donate_argnums=(0, 1))
    losses = [float(step(model, optimizer, *shard_batch(batch, mesh))) for batch in BATCHES]
    return model, optimizer, losses


@functools.cache
def replicated(tx=adam, has_days=True):
    return trained(mesh_of(), tx=tx, has_days=has_days)


def assert_same(found, wanted):
    """Compare dense variables, or those of optimizers, and their values."""
    found, wanted = (
        {name: np.asarray(each.get_value()) for name, each in named.items()}
        for named in (found, wanted)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def shardings(*modules):
    return {
        name: each.get_raw_value().sharding.spec
        for module in modules
        for name, each in variables(module, (nnx.Param, nnx.optimizer.OptState)).items()
    }


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("name", "optimizer_first"),
    [("one_axis", True), ("two_axes", False), ("explicit", False)],
    ids=["one_axis-optimizer_first", "two_axes-shard_first", "explicit-shard_first"],
)
def test_training_equals_replicated(name, optimizer_first):
    has_days = name != "explicit"
    alone, alone_optimizer, wanted = replicated(has_days=has_days)
    mesh = mesh_of(name)
    model, optimizer, losses = trained(
        mesh, dense="fsdp", optimizer_first=optimizer_first, has_days=has_days
    )
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert_same(dense_variables(model), dense_variables(alone))
    assert_same(variables(optimizer), variables(alone_optimizer))
    np.testing.assert_allclose(
        model.embeddings.table("user"), alone.embeddings.table("user"), rtol=1e-6, atol=1e-6
    )
    axes = tuple(mesh.axis_names)
    axes = axes[0] if len(axes) == 1 else axes
    found = {k: s for k, s in shardings(model, optimizer).items() if any(s)}
    spec = {
        "first/kernel": (None, axes),
        "second/kernel": (axes,),
        "days/embedding": (axes,),
    }
    assert len(found) == 3 * (len(SHARDED) - (not has_days))  # each with both moments of Adam
    for path, sharding in found.items():
        (wanted_spec,) = [s for end, s in spec.items() if path.endswith(end)]
        assert tuple(sharding)[: len(wanted_spec)] == wanted_spec, path


def clip():
    return optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1, momentum=0.9))


def adafactor():
    return optax.adafactor(1e-3)


@pytest.mark.parametrize("tx", [clip, adafactor], ids=["clip", "adafactor"])
def test_optimizers_that_look_at_whole_arrays(tx):
    alone, alone_optimizer, wanted = replicated(tx)
    model, optimizer, losses = trained(mesh_of(), tx=tx, dense="fsdp")
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert_same(dense_variables(model), dense_variables(alone))
    assert_same(variables(optimizer), variables(alone_optimizer))


def bytes_on_each_device(*modules):
    """Bytes of parameters and optax state on each device."""
    sizes = dict.fromkeys(jax.devices(), 0)
    for module in modules:
        for each in variables(module, (nnx.Param, nnx.optimizer.OptState)).values():
            for part in each.get_raw_value().addressable_shards:
                sizes[part.device] += part.data.nbytes
    return [*sizes.values()]


@functools.cache
def compiled(**options):
    mesh = mesh_of()
    model = jaxrec.shard(Ranker(), PLAN, mesh, **options)
    optimizer = jaxrec.Optimizer(model, adam())
    step = compile_step(train_step, model, optimizer)
    program = step.lower(*shard_batch(BATCHES[0], mesh)).compile(AS_USERS_DO)
    return program, bytes_on_each_device(model, optimizer)


@pytest.mark.slow
@pytest.mark.jax_version
def test_memory_of_a_device_shrinks_as_computed():
    """Each sharded array and its two moments take an eighth of their bytes."""
    before, whole = compiled()
    after, parts = compiled(dense="fsdp")
    saved = sum(SHARDED.values()) * 3 * 4 * (DEVICES - 1) // DEVICES
    assert parts == [size - saved for size in whole]
    arguments = [each.memory_analysis().argument_size_in_bytes for each in (before, after)]
    assert arguments[0] - arguments[1] == saved


@pytest.mark.jax_version
def test_the_compiled_step():
    """It gathers each parameter once, and takes what it returns."""
    program, _ = compiled(dense="fsdp")
    gathered = [each.result_bytes for each in collectives(program) if each.kind == "all-gather"]
    gathered = [size for size in gathered if size > 2048]  # ids and gradients of `nnx.Embed`'s rows
    assert sorted(gathered) == sorted(4 * size for size in SHARDED.values())
    (values, *_), _ = program.input_shardings
    results, _ = program.output_shardings
    for given, result in zip(jax.tree.leaves(values), jax.tree.leaves(results), strict=True):
        assert given.is_equivalent_to(result, 3), (given, result)


def test_a_rule_places_parameters():
    """Parameters of a rule lie as it says, and layers read them as they lie."""
    seen = {}
    specs = {"first/kernel": PartitionSpec(None, "device"), "over/kernel": PartitionSpec()}

    def rule(path, form):
        seen[path] = form.shape
        return specs.get(path)

    # Adam divides a gradient by its size, and multiplies the rounding errors of another order.
    alone, alone_optimizer, wanted = replicated(clip)
    model, optimizer, losses = trained(mesh_of("two_axes"), tx=clip, dense=rule)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert_same(dense_variables(model), dense_variables(alone))
    assert_same(variables(optimizer), variables(alone_optimizer))
    assert seen["first/kernel"] == (DIM, WIDE)
    assert seen.keys() == {name for name in variables(model, nnx.Param)}
    found = {k: tuple(s) for k, s in shardings(model, optimizer).items() if any(s)}
    assert found["first/kernel"] == (None, "device")
    assert found["opt_state/1/0/trace/first/kernel"] == (None, "device")
    assert found["second/kernel"] == (("host", "device"),)
    assert model.first.kernel[...].sharding.spec == PartitionSpec(None, "device")


@pytest.mark.jax_version
def test_reads_are_whole_and_raw_values_are_shards():
    model = jaxrec.shard(Ranker(), PLAN, mesh_of(), dense="fsdp")
    kernel, alone = model.first.kernel, Ranker().first.kernel
    assert isinstance(kernel, nnx.Param)
    assert isinstance(kernel, PlacedVariable)
    assert kernel.shape == (DIM, WIDE)
    for whole in (kernel[...], kernel.get_value(), jnp.asarray(kernel), kernel.whole()):
        assert whole.sharding.is_fully_replicated
        np.testing.assert_array_equal(whole, alone[...])
    np.testing.assert_array_equal(kernel[3], alone[3])
    assert kernel.get_raw_value().addressable_shards[0].data.shape == (DIM, WIDE // DEVICES)
    copy = nnx.clone(model)
    assert copy.first.kernel.get_raw_value().sharding == kernel.get_raw_value().sharding


def test_a_model_is_placed_anew():
    """From shards over eight devices to whole arrays on four, and to shards over four."""
    model = jaxrec.shard(Ranker(), PLAN, mesh_of(), dense="fsdp")
    four = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    for options, kind in (({}, nnx.Param), ({"dense": "fsdp"}, PlacedVariable)):
        model = jaxrec.shard(model, PLAN, four, **options)
        assert isinstance(model.first.kernel, kind)
        assert isinstance(model.first.kernel, PlacedVariable) == bool(options)
        assert len(model.first.kernel.get_raw_value().sharding.device_set) == 4
        assert_same(dense_variables(model), dense_variables(Ranker()))


class Tied(nnx.Module):
    def __init__(self):
        self.embeddings = Ranker().embeddings
        self.up = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
        self.also = nnx.List([self.up])


def test_shared_parameters_stay_shared():
    model = jaxrec.shard(Tied(), PLAN, mesh_of(), dense="fsdp")
    assert model.up.kernel is model.also[0].kernel
    assert isinstance(model.up.kernel, PlacedVariable)


def test_small_arrays_and_single_devices_stay_whole():
    one = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    model = jaxrec.shard(Ranker(), PLAN, one, dense="fsdp")
    assert not any(isinstance(x, PlacedVariable) for x in variables(model).values())
    model = jaxrec.shard(Ranker(), PLAN, mesh_of(), dense="fsdp")
    sharded = {k for k, x in variables(model).items() if isinstance(x, PlacedVariable)}
    assert sharded == set(SHARDED)
    assert min(SHARDED.values()) == MIN_SHARDED_SIZE


@pytest.mark.jax_version
def test_a_large_array_that_no_axis_divides_stays_whole():
    class Odd(nnx.Module):
        def __init__(self):
            self.embeddings = Ranker().embeddings
            self.odd = nnx.Linear(257, 257, rngs=nnx.Rngs(0))

    with pytest.warns(UserWarning, match=r"'odd/kernel' of shape \(257, 257\) stays whole"):
        model = jaxrec.shard(Odd(), PLAN, mesh_of(), dense="fsdp")
    assert not isinstance(model.odd.kernel, PlacedVariable)


def gradients(dense="replicated", precision=BFLOAT16):
    mesh = mesh_of("explicit")
    model = jaxrec.shard(Ranker(False), PLAN, mesh, dense=dense, precision=precision)
    return gradient_arrays(model, shard_batch(BATCHES[0], mesh))


@nnx.jit
def gradient_arrays(model, batch):
    features, days, labels = batch

    def loss_fn(model):
        return ((model(features, days) - labels) ** 2).mean()

    _, found = jaxrec.value_and_grad(loss_fn)(model)
    return {name: each.get_raw_value() for name, each in variables(found.dense).items()}


def part(batch, device):
    """The samples of a device."""
    features, days, labels = batch
    own = slice(device * BATCH // DEVICES, (device + 1) * BATCH // DEVICES)
    users = np.asarray(features.values).reshape(BATCH, 3)[own]
    return jaxrec.KeyedJaggedArray.from_dense({"user": users}), days[own], labels[own]


@pytest.mark.parametrize("placed", ["replicated", "fsdp"])
def test_gradients_in_bfloat16_differ_by_their_rounding(placed):
    """Each device rounds its part, a relative 2**-8, and the sum where it travels on."""
    alone = Ranker(False)
    parts = [gradient_arrays(alone, part(BATCHES[0], device)) for device in range(DEVICES)]
    found, exact = gradients(placed), gradients(placed, jaxrec.mesh.ExchangePrecision())
    for name, value in found.items():
        each = np.stack([np.asarray(own[name], np.float64) / DEVICES for own in parts])
        error = np.abs(np.asarray(value, np.float64) - each.sum(0))
        bound = 2**-22 * np.abs(each).sum(0) + 1e-9  # sums in another order, in float32
        if name in SHARDED:
            bound += 2**-8 * np.abs(each).sum(0) * (2.01 if placed == "replicated" else 1)
            assert (error > 1e-3 * np.abs(each.sum(0))).any(), "nothing was rounded"
        assert (error <= bound).all(), name
        assert value.sharding.is_equivalent_to(exact[name].sharding, value.ndim)


@pytest.mark.slow
@pytest.mark.jax_version
@pytest.mark.parametrize("placed", ["replicated", "fsdp"])
def test_bytes_of_gradients_in_bfloat16(placed):
    """No large gradient travels in float32, and none is all-reduced."""
    mesh = mesh_of("explicit")
    model = jaxrec.shard(Ranker(False), PLAN, mesh, dense=placed, precision=BFLOAT16)
    optimizer = jaxrec.Optimizer(model, adam())
    step = compile_step(train_step, model, optimizer)
    program = step.lower(*shard_batch(BATCHES[0], mesh)).compile(AS_USERS_DO)
    found = sorted((each.kind, each.result_bytes) for each in collectives(program))
    large = [each for each in found if each[1] >= MIN_SHARDED_SIZE]
    sizes = (DIM * WIDE, WIDE * 128)
    width = 4 if placed == "fsdp" else 2  # the parameters, or the sums in bfloat16
    gathers = [("all-gather", width * size) for size in sizes]
    assert large == gathers + [("all-to-all", 2 * size) for size in sizes]


@pytest.mark.slow
def test_training_in_bfloat16():
    _, _, wanted = replicated(has_days=False)
    for placed in ("replicated", "fsdp"):
        options = {"dense": placed, "precision": BFLOAT16, "has_days": False}
        model, _, losses = trained(mesh_of("explicit"), **options)
        np.testing.assert_allclose(losses, wanted, rtol=1e-3)
    assert model.second.kernel.get_raw_value().sharding.spec[0] == "data"


def test_bfloat16_needs_explicit_axes():
    with pytest.raises(
        ValueError, match=r"all Explicit.*make_mesh\(\(2, 4\), \('host', 'device'\)\)"
    ):
        jaxrec.shard(Ranker(), PLAN, mesh_of("two_axes"), precision=BFLOAT16)


ERRORS = {
    "name": ("zero3", ValueError, "dense='zero3' is not one of 'replicated', 'fsdp'"),
    "type": (8, TypeError, "dense is 'replicated', 'fsdp', or a function"),
    "result": (lambda path, form: "data", TypeError, "returned 'data' for parameter 'days/embeddi"),
    "axes": (
        lambda path, form: PartitionSpec(None, None, "data"),
        ValueError,
        r"whose shape \(4096, 16\) has fewer axes",
    ),
    "axis": (
        lambda path, form: PartitionSpec("model"),
        ValueError,
        "has no axis 'model'; its axes",
    ),
    "divides": (
        lambda path, form: PartitionSpec("data") if path == "over/bias" else None,
        ValueError,
        "'over/bias' of shape .1,., but 1 does not divide by 8 devices",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_come_before_anything_moves(name, unchecked):
    given, kind, message = ERRORS[name]
    model = Ranker()
    with pytest.raises(kind, match=message):
        jaxrec.shard(model, PLAN, mesh_of(), dense=given)
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert len(leaf.sharding.device_set) == 1
