"""Programs that call, take or return something else than their model says."""

from __future__ import annotations

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from jaxlib.mlir import ir

import jaxrec
from jaxrec.serve import ArtifactError, export, load
from tests.fuzz import max_examples
from tests.serve.artifact.edited import edit_programs, write_manifest
from tests.serve.models import dlrm
from tests.serve.record import DTYPES, RECORDED, make_batch

pytestmark = pytest.mark.jax_version


@pytest.fixture
def model(tmp_path):
    """A copy of an exported model, to be edited."""
    return shutil.copytree(RECORDED / "int8", tmp_path / "model")


def with_target(name):
    return lambda text: re.sub(r"@jaxrec\.flatten_bags\.v1", f'@"{name}"', text, count=1)


@pytest.mark.parametrize(
    "target",
    [
        "xla_ffi_python_cpu_callback", "xla_python_cpu_callback", "system", "mhlo.custom_call",
        "jaxrec_fused_update", "lapack_x", "cu_anything", "Sharding2", "jaxrec.flatten_bags.v2",
    ],
)  # fmt: skip
def test_programs_that_call_what_is_not_known(model, target):
    edit_programs(model, with_target(target))
    message = rf"programs/cpu-[18].jax calls {re.escape(target)}: "
    for change in (
        lambda manifest: None,
        lambda manifest: [each["targets"].append(target) for each in manifest["programs"]],
    ):
        write_manifest(model, change)
        for verify in (True, False):
            with pytest.raises(ArtifactError, match=message):
                load(model, verify=verify)


def test_calls_of_jaxrec_are_those_of_the_manifest(model):
    write_manifest(model, lambda m: m["programs"][0]["targets"].remove("jaxrec.flatten_bags.v1"))
    with pytest.raises(ArtifactError, match=r"jaxrec.flatten_bags.v1, which the manifest does not"):
        load(model)


def with_infeed(text):
    token = '%tok = "stablehlo.create_token"() : () -> !stablehlo.token\n    '
    infeed = '%in:2 = "stablehlo.infeed"(%tok) {infeed_config = ""} : (!stablehlo.token) -> '
    infeed += "(tensor<1xf32>, !stablehlo.token)\n    "
    start = re.search(r"func\.func public @main\([^\n]*\{\n    ", text).end()
    return text[:start] + token + infeed + text[start:]


def test_programs_that_wait_for_the_host(model):
    edit_programs(model, with_infeed)
    with pytest.raises(ArtifactError, match=r"calls stablehlo.infeed: which jaxrec does not know"):
        load(model)


def test_programs_without_a_main_function(model):
    edit_programs(model, lambda text: text.replace("@main", "@other"))
    with pytest.raises(ArtifactError, match=r"cpu-1.jax cannot be read by JAX .*no function main"):
        load(model)


def test_arguments_and_results_are_those_of_the_manifest(model):
    write_manifest(model, lambda manifest: manifest["outputs"][0].update(shape=[2]))
    with pytest.raises(ArtifactError, match=r"cpu-1.jax returns tensor<1xf32>; by the manifest it"):
        load(model)
    write_manifest(model, lambda manifest: manifest["outputs"][0].update(shape=[]))
    write_manifest(model, lambda m: m["batch"]["sizes"][0]["capacities"][0].__setitem__(0, 64))
    with pytest.raises(ArtifactError, match=r"cpu-1.jax takes tensor<.*; by the manifest it takes"):
        load(model)


@pytest.fixture(scope="module")
def predictions(forks):
    """Returns the error of a model's prediction; another process predicts, and may crash."""

    def start():
        return forks.start("tests.serve.artifact.edited:predict", make_batch(8))

    fork = start()

    def error_of(path):
        nonlocal fork
        try:
            fork.connection.send(path)
            return fork.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            crashed, fork = fork, start()
            pytest.fail(f"the process ended with {crashed.wait(60)}: {crashed.errors[-2000:]}")

    yield error_of
    fork.connection.send(None)


# What stands in a call's attributes and shapes.
NUMBER = re.compile(r"(?<![\w.@#%])-?\d+(?![\w.])|(?<=tensor<)\d+|(?<=x)\d+(?=x)")
NUMBERS = st.one_of(
    st.integers(-9, 200), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)])
)


def with_number(which: int, number: int):
    """Return an edit of one number of jaxrec's calls."""

    def change(text):
        places = [
            (call.start(1) + place.start(), call.start(1) + place.end())
            for call in re.finditer(r"custom_call (@jaxrec\.[^\n]*)", text)
            for place in NUMBER.finditer(call[1])
        ]
        start, end = places[which % len(places)]
        # XLA itself ends the process where the bytes of an array are beyond int64.
        is_extent = text[start - 1] in "<x"
        return f"{text[:start]}{number % 256 if is_extent else number}{text[end:]}"

    return change


@pytest.mark.slow
@settings(
    max_examples=max_examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)
@given(data=st.data())
def test_calls_with_other_numbers(predictions, tmp_path_factory, data):
    """Any prediction or error, never a crash."""
    path = tmp_path_factory.mktemp("edited") / "model"
    shutil.copytree(RECORDED / data.draw(st.sampled_from(DTYPES), "model"), path)
    change = with_number(data.draw(st.integers(0, 2**16), "which"), data.draw(NUMBERS, "number"))
    try:
        edit_programs(path, change)
    except (ir.MLIRError, ValueError):
        reject()  # MLIR refuses the program
    event(re.sub(r"\d+", "N", predictions(path))[:160])


@pytest.mark.slow
def test_calls_of_jax_that_check_their_arguments_are_exported(tmp_path):
    """Linear algebra by LAPACK, and what XLA has names for."""

    def function(model, dense, features):
        scores = model(dense, features)
        top, _ = jax.lax.top_k(dense, 2)
        matrix = jnp.eye(3) + jnp.outer(dense[0], dense[0])
        return scores + jax.scipy.special.erf(top[:, 0]) + jnp.linalg.cholesky(matrix)[0, 0]

    case = dlrm()
    dense, features = case.batch(4)
    options = {"batch_sizes": (4,), "platforms": ("cpu",), "example": (dense, features)}
    export(case.model, tmp_path / "model", function=function, **options)
    expected = nnx.jit(function)(case.model, dense, features)
    scores = load(tmp_path / "model").predict(dense, features)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_calls_of_python_are_not_exported(tmp_path):
    def function(model, features):
        pooled = model(features).values
        shape = jax.ShapeDtypeStruct(pooled.shape, pooled.dtype)
        return jax.pure_callback(lambda x: x, shape, pooled)

    tables = [jaxrec.EmbeddingBagConfig("user", 9, 4)]
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"cannot be exported|no compatibility"):
        export(model, tmp_path / "m", function=function, batch_sizes=(4,), platforms=("cpu",))
