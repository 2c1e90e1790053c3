"""Random models, trained beside their formulas in NumPy float64, step by step.

Each step begins with the rows and the optimizer state that jaxrec has, so that what is compared is
one step, and a tolerance is a bound on the rounding of that step:

- A sum of ``n`` float32 products is within ``(n + 4) eps`` of the sum of their sizes, in any order.
- A new row is one that exact arithmetic gives for gradients within that bound and for rows and
  state within some ``eps``. How far such rows lie apart is measured, by drawing some.
- A number stored in 16 bits is one of the two neighbours.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxrec
from jaxrec import optim
from tests.optim import oracle

EPS = float(np.finfo(np.float32).eps)
LONGEST = 4  # ids of a bag
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Call:
    """One batch of one lookup.

    Attributes:
        bags: For each feature its bags of ids; ids outside of the tables among them.
        inverse: For each feature the bag of each sample; None: each sample has its own.
        cotangents: For each output, by (table, feature), the gradient of its elements: for pooled
            tables one row a sample, else one row an id.
    """

    bags: dict[str, list[list[int]]]
    inverse: dict[str, list[int]] | None
    cotangents: dict[tuple[str, str], np.ndarray]

    def bags_of_samples(self, feature: str) -> list[list[int]]:
        bags = self.bags[feature]
        return bags if self.inverse is None else [bags[i] for i in self.inverse[feature]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the batches that it is trained on.

    Attributes:
        configs: The tables.
        optimizer: Optimizer of the tables that name none.
        is_weighted: Whether ids have weights, which are parameters of the model.
        dtype: Type of the activations.
        weight_dtype: Type in which weights reach the lookup.
        samples: Samples of each batch.
        steps: For each step its calls.
    """

    configs: list[jaxrec.EmbeddingBagConfig] | list[jaxrec.EmbeddingConfig]
    optimizer: optim.RowOptimizer
    is_weighted: bool
    dtype: str
    weight_dtype: str
    samples: int
    steps: list[list[Call]]

    @property
    def is_pooled(self) -> bool:
        return isinstance(self.configs[0], jaxrec.EmbeddingBagConfig)

    @property
    def outputs(self) -> list[tuple[jaxrec.EmbeddingBagConfig, str]]:
        return [(config, f) for config in self.configs for f in config.feature_names]

    def key(self, table: str, feature: str) -> str:
        shared = sum(f == feature for _, f in self.outputs) > 1
        return f"{feature}@{table}" if shared else feature


def draw_case(rng: np.random.Generator, samples: int) -> Case:
    """A random model, and random batches of ``samples`` samples."""
    is_pooled = rng.random() < 0.75
    features = [f"f{i}" for i in range(rng.integers(1, 4))]
    default = draw_optimizer(rng)
    configs = []
    for i in range(rng.integers(1, 4)):
        names = tuple(rng.permutation(features)[: rng.integers(1, len(features) + 1)].tolist())
        settings = {"pooling": str(rng.choice(["sum", "mean"]))} if is_pooled else {}
        kind = jaxrec.EmbeddingBagConfig if is_pooled else jaxrec.EmbeddingConfig
        configs.append(
            kind(
                f"t{i}",
                int(rng.integers(1, 24)),
                int(rng.choice([1, 2, 4, 6, 8, 12, 20])),
                feature_names=names,
                dtype=str(rng.choice(["float32", "float32", "bfloat16", "float16"])),
                optimizer=draw_optimizer(rng) if rng.random() < 0.4 else None,
                **settings,
            )
        )
    used = sorted({f for config in configs for f in config.feature_names})
    bounds = {f: min(c.num_embeddings for c in configs if f in c.feature_names) for f in used}
    is_weighted = is_pooled and rng.random() < 0.4
    calls = int(rng.integers(1, 3))
    # For each call how many bags each feature has where samples share bags.
    shared = [
        {f: int(rng.integers(1, samples + 3)) for f in used} if rng.random() < 0.4 else None
        for _ in range(calls)
    ]
    is_bad = not is_weighted and rng.random() < 0.3
    case = Case(
        configs,
        default,
        is_weighted,
        str(rng.choice(["float32", "float32", "bfloat16", "float16"])),
        str(rng.choice(["float32", "bfloat16", "float16"])),
        samples,
        [],
    )
    for _ in range(STEPS):
        case.steps.append([_draw_call(rng, case, bounds, count, is_bad) for count in shared])
    return case


def _draw_call(rng, case, bounds, num_bags, is_bad) -> Call:
    bags = {}
    for feature, bound in bounds.items():
        count = case.samples if num_bags is None else num_bags[feature]
        # Half of the batches are skewed to a few rows.
        high = bound if rng.random() < 0.5 else min(bound, 2)
        bags[feature] = [
            rng.integers(0, high, rng.integers(0, LONGEST + 1)).tolist() for _ in range(count)
        ]
        for bag in bags[feature]:
            if is_bad and bag and rng.random() < 0.15:
                bag[rng.integers(len(bag))] = int(rng.choice([24, 2**30, 2**31 - 1]))
    inverse = None
    if num_bags is not None:
        inverse = {f: rng.integers(0, n, case.samples).tolist() for f, n in num_bags.items()}
    call = Call(bags, inverse, {})
    for config, feature in case.outputs:
        lines = case.samples if case.is_pooled else sum(map(len, call.bags_of_samples(feature)))
        # Multiples of 1/16, which all types have; some are zeros.
        size = 2.0 ** rng.integers(-1, 5)
        values = rng.integers(-size, size + 1, (lines, config.embedding_dim)) / 16
        call.cotangents[config.name, feature] = values
    return call


def draw_optimizer(rng: np.random.Generator) -> optim.RowOptimizer:
    """Any of the row optimizers, with random settings."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    rate = float(10 ** rng.uniform(-3, -0.5))
    common = {
        "clip_value": one_of(None, None, 0.1, 0.5),
        "clip_norm": one_of(None, None, None, 0.3, 3.0),
        "max_norm": one_of(None, None, None, 0.4, 2.0),
        "stochastic_rounding": one_of(True, False),
    }
    eps, decay = one_of(1e-8, 1e-3), one_of(0.0, 0.01, 0.3)
    moments = {
        "b1": one_of(0.0, 0.5, 0.9, 0.999),
        "b2": one_of(0.0, 0.9, 0.999, 0.9999, 0.99999),
        "eps": eps,
        "weight_decay": decay,
    }
    if moments["b1"] > moments["b2"] == 0:
        # A gradient of zero would move a row by its momentum over eps, past float16.
        moments["b2"] = 0.5
    start = one_of(0.0, 0.1, 1.0)
    average = {"decay": one_of(0.0, 0.9, 0.99, 0.9999), "eps": eps}
    kinds = {
        optim.sgd: {},
        optim.momentum_sgd: {"momentum": one_of(0.0, 0.5, 0.9), "nesterov": one_of(True, False)},
        optim.adagrad: {"eps": eps, "initial_accumulator_value": start},
        optim.rowwise_adagrad: {
            "eps": eps,
            "weight_decay": decay,
            "weight_decay_mode": one_of("none", "l2", "decoupled"),
            "initial_accumulator_value": start,
        },
        optim.adam: moments | {"rowwise_bias_correction": one_of(True, False)},
        optim.partial_rowwise_adam: moments,
        optim.lamb: moments,
        optim.partial_rowwise_lamb: moments,
        optim.lars_sgd: {
            "momentum": one_of(0.0, 0.9),
            "eta": one_of(0.001, 0.5),
            "weight_decay": decay,
        },
        optim.rmsprop: average,
        optim.rowwise_rmsprop: average
        | {"ar_alpha": one_of(0.0, 0.5), "min_shrinkage": one_of(0.0, 0.9)},
        optim.ftrl: {
            "learning_rate_power": one_of(-0.5, -0.3, -0.9, 0.0),
            "beta": one_of(0.0, 1.0),
            "l1": one_of(0.0, 0.1),
            "l2": one_of(0.0, 0.3),
            "initial_accumulator_value": start,
        },
    }
    kind = one_of(*kinds)
    return kind(rate, **kinds[kind], **common)


class Model(nnx.Module):
    """A collection, and for each call the weight of each id."""

    def __init__(self, case: Case):
        kind = jaxrec.EmbeddingBagCollection if case.is_pooled else jaxrec.EmbeddingCollection
        settings = {"is_weighted": case.is_weighted} if case.is_pooled else {}
        self.embeddings = kind(
            case.configs,
            optimizer=case.optimizer,
            dtype=case.dtype,
            rngs=nnx.Rngs(0),
            **settings,
        )
        self.weights = nnx.Param(jnp.linspace(-1, 2, 24))
        self.weight_dtype = case.weight_dtype

    def __call__(self, features):
        if self.embeddings.is_weighted:
            weights = self.weights[jnp.clip(features.values, 0, 23)].astype(self.weight_dtype)
            features = dataclasses.replace(features, weights=weights)
        found = self.embeddings(features)
        if isinstance(found, dict):
            return {key: column.values for key, column in found.items()}
        return {key: found[key] for key in found.keys}


@nnx.jit(donate_argnums=0)
def train_step(model, batches, cotangents, step):
    """One update by the given gradient of the outputs; the outputs, and the weights' gradient."""

    def loss(model):
        outputs = [model(batch) for batch in batches]
        total = sum(
            (values.astype("float32") * slopes[key]).sum()
            for found, slopes in zip(outputs, cotangents, strict=True)
            for key, values in found.items()
        )
        return total, outputs

    (_, outputs), gradients = jaxrec.value_and_grad(loss, has_aux=True)(model)
    model.embeddings.apply_gradients(gradients.tables["embeddings"], step)
    return outputs, gradients.dense["weights"]


def host_batch(call: Call) -> jaxrec.KeyedJaggedArray:
    """The batch of a call as the library takes it, with room for all bags to be full."""
    inverse = None if call.inverse is None else list(call.inverse.values())
    room = {f: LONGEST * len(bags) for f, bags in call.bags.items()}
    return jaxrec.KeyedJaggedArray.from_lists(call.bags, inverse_indices=inverse, capacities=room)


def check(case: Case, model: Model, place=None) -> None:
    """Train the model beside the formulas.

    Args:
        case: The case.
        model: Its model, on one device or on a mesh.
        place: Puts a call on the mesh: ``place(case, call) -> (batch, cotangents, gather)``, where
            ``gather(key, output)`` is an output as it is on one device.
    """
    for number, calls in enumerate(case.steps):
        names = [config.name for config in case.configs]
        rows = {name: as_float64(model.embeddings.table(name)) for name in names}
        state = {name: _state(model, name) for name in names}
        placed = [_place(case, call) if place is None else place(case, call) for call in calls]
        outputs, slopes = train_step(
            model, [p[0] for p in placed], [p[1] for p in placed], jnp.int32(number)
        )
        weights = as_float64(model.weights[...].astype(case.weight_dtype))
        for call, found, (_, _, gather) in zip(calls, outputs, placed, strict=True):
            _check_outputs(case, call, rows, weights, {k: gather(k, v) for k, v in found.items()})
        if case.is_weighted:
            _check_weights(case, calls, rows, as_float64(slopes[...]))
        for config in case.configs:
            new = as_float64(model.embeddings.table(config.name)), _state(model, config.name)
            old = rows[config.name], state[config.name]
            _check_table(case, config, calls, weights, old, new, number)


def _place(case, call):
    batch = host_batch(call)
    room = dict(zip(batch.keys, batch.sample_capacities or batch.capacities, strict=True))
    cotangents = {}
    for (table, feature), values in call.cotangents.items():
        wide = 0 if case.is_pooled else room[feature] - len(values)
        cotangents[case.key(table, feature)] = np.float32(np.pad(values, ((0, wide), (0, 0))))
    return batch, cotangents, lambda key, values: as_float64(values)


def _state(model, name):
    return {k: as_float64(v) for k, v in model.embeddings.table_state(name).items()}


def as_float64(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _lookups(case, call, config, feature, weights):
    """(line of the cotangent, row, scale) of each lookup of each sample."""
    line = 0
    for sample, bag in enumerate(call.bags_of_samples(feature)):
        for row in bag:
            scale = weights[np.clip(row, 0, 23)] if case.is_weighted else 1.0
            if getattr(config, "pooling", "sum") == "mean" and case.is_pooled:
                scale = scale / len(bag)
            yield (sample if case.is_pooled else line), row, scale
            line += 1


def _check_outputs(case, call, rows, weights, found):
    for config, feature in case.outputs:
        key, table = case.key(config.name, feature), rows[config.name]
        lines = len(call.cotangents[config.name, feature])
        expected, size = np.zeros((2, lines, config.embedding_dim))
        for line, row, scale in _lookups(case, call, config, feature, weights):
            is_row = 0 <= row < len(table)
            expected[line] += scale * table[row] if is_row else np.nan
            size[line] += np.abs(scale * table[row]) if is_row else 0
        bound = (LONGEST + 4) * EPS * size + _rounding(case.dtype, expected)
        _assert_within(found[key][:lines], expected, bound, f"output {key}")
        # What lies behind the last id of a sequence is padding.
        assert not np.any(found[key][lines:])


def _check_weights(case, calls, rows, found):
    expected, size, count = np.zeros((3, len(found)))
    ids = np.arange(len(found))
    for call in calls:
        for config, feature in case.outputs:
            cotangent, table = call.cotangents[config.name, feature], rows[config.name]
            ones = np.ones(len(ids))
            for line, row, scale in _lookups(case, call, config, feature, ones):
                products = scale * table[row] * cotangent[line]
                expected[row] += products.sum()
                size[row] += np.abs(products).sum()
                count[row] += products.size
    # The slope of each lookup is rounded to the weights' type; their sum is in float32.
    narrow = 0 if case.weight_dtype == "float32" else float(jnp.finfo(case.weight_dtype).eps)
    bound = ((count + 4) * EPS + narrow) * size + count * 2.0**-24 * (
        case.weight_dtype == "float16"
    )
    _assert_within(found, expected, bound, "gradient of the weights")


def _check_table(case, config, calls, weights, old, new, number):
    (rows, state), (new_rows, new_state) = old, new
    optimizer = config.optimizer or case.optimizer
    total, size, count = np.zeros((3, *rows.shape))
    occurs = np.zeros(len(rows), bool)
    for call in calls:
        for feature in config.feature_names:
            cotangent = call.cotangents[config.name, feature]
            if optimizer.clip_value is not None:
                cotangent = np.clip(cotangent, -optimizer.clip_value, optimizer.clip_value)
            for line, row, scale in _lookups(case, call, config, feature, weights):
                if 0 <= row < len(rows):
                    total[row] += scale * cotangent[line]
                    size[row] += np.abs(scale * cotangent[line])
                    count[row] += 1
                    occurs[row] = True
    name = f"table {config.name} after step {number} by {optimizer}"
    np.testing.assert_array_equal(new_rows[~occurs], rows[~occurs], err_msg=name)
    for key, array in state.items():
        np.testing.assert_array_equal(new_state[key][~occurs], array[~occurs], err_msg=name)
    if not occurs.any():
        return

    off = (count + 4) * EPS * size
    wide = (8 + 2 * config.embedding_dim) * EPS

    def formula(noise):
        gradients = total + noise(total.shape) * off
        if optimizer.clip_norm is not None:
            norm = np.sqrt((gradients**2).sum())
            gradients = gradients * min(1, optimizer.clip_norm / (norm + 1e-6))
        start = {
            key: array if key in ("count", "last_step") else array * (1 + wide * noise(array.shape))
            for key, array in state.items()
        }
        start = {key: array[occurs] for key, array in start.items()}
        begin = rows * (1 + wide * noise(rows.shape))
        return oracle.updated(optimizer, begin[occurs], gradients[occurs], start, number)

    rng = np.random.default_rng(number)
    expected, expected_state = formula(np.zeros)
    noises = [np.ones, lambda shape: -np.ones(shape)]
    noises += [lambda shape: rng.choice([-1.0, 1.0], shape)] * 6
    others = [formula(noise) for noise in noises]

    def check_array(found, wanted, alike, before, stored, what):
        spread = np.max([np.abs(array - wanted) for array in alike], axis=0)
        sizes = np.abs(before) + np.abs(wanted)
        _assert_within(found, wanted, 2 * spread + wide * sizes + _rounding(stored, wanted), what)

    check_array(
        new_rows[occurs], expected, [o[0] for o in others], rows[occurs], config.dtype, name
    )
    assert new_state.keys() == expected_state.keys()
    for key, wanted in expected_state.items():
        alike = [o[1][key] for o in others]
        before = state[key][occurs]
        check_array(new_state[key][occurs], wanted, alike, before, "float32", f"{key} of {name}")


def _rounding(dtype, values):
    """The distance of neighbours of values in a type."""
    tiny = {"float16": 2.0**-24}.get(jnp.dtype(dtype).name, 1e-37)
    return float(jnp.finfo(dtype).eps) * np.nan_to_num(np.abs(values)) + tiny


def _assert_within(found, expected, bound, what):
    same = np.isnan(found) == np.isnan(expected)
    close = np.isnan(expected) | (np.abs(found - expected) <= bound)
    assert found.shape == expected.shape, what
    if not (same & close).all():
        at = tuple(int(i) for i in np.argwhere(~(same & close))[0])
        raise AssertionError(
            f"{what} at {at}: {found[at]!r}, in NumPy {expected[at]!r}, "
            f"off by {abs(found[at] - expected[at]):.3g} where {bound[at]:.3g} is allowed"
        )
