"""The C++ program: the scores of training, errors that name the cause, and no crash."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from tests.serve import cpp
from tests.serve.artifact import test_poolings as poolings
from tests.serve.artifact.edited import edit_programs, write_manifest
from tests.serve.artifact.test_program_file import with_infeed, with_target
from tests.serve.models import MODELS, collection, dlrm
from tests.serve.record import RECORDED, Ranker, make_batch

pytestmark = pytest.mark.slow  # builds cpp/

needs_runtime = pytest.mark.skipif(
    cpp.missing(with_runtime=True) is not None, reason=str(cpp.missing(with_runtime=True))
)
needs_compiler = pytest.mark.skipif(
    cpp.missing(with_runtime=False) is not None, reason=str(cpp.missing(with_runtime=False))
)

SIZES = (1, 8)


def write(path: pathlib.Path, model, example, function=None, **options) -> pathlib.Path:
    jaxrec.serve.export(
        model,
        path,
        function=function,
        example=example,
        batch_sizes=SIZES,
        platforms=("cpu",),
        **options,
    )
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> pathlib.Path:
    """A DLRM; not to be changed."""
    case = dlrm()
    return write(tmp_path_factory.mktemp("cpp") / "model", case.model, case.batch(20))


@pytest.fixture
def damaged(exported, tmp_path) -> pathlib.Path:
    """A copy of the DLRM, to be damaged."""
    return pathlib.Path(shutil.copytree(exported, tmp_path / "model"))


def request(samples: int = 2) -> dict:
    return cpp.columns(*dlrm().batch(samples))


@needs_runtime
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_model(name, dtype, tmp_path):
    case = MODELS[name]()
    if dtype != "float32":
        case = case._replace(model=jaxrec.serve.quantize(case.model, dtype=dtype))
    model = write(tmp_path / "model", case.model, case.batch(20), case.function)
    batches = [case.batch(samples) for samples in (1, 5, 30)]
    answers = cpp.predict(model, [json.dumps(cpp.columns(*batch)) for batch in batches])
    assert answers.code == 0, answers.error
    for batch, line in zip(batches, answers.lines, strict=True):
        expected = np.asarray(case.expected(*batch))
        np.testing.assert_allclose(line["score"], expected, rtol=1e-5, atol=1e-5)


@needs_runtime
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_weights_and_sequences(dtype, tmp_path):
    model = Ranker(nnx.Rngs(0))
    if dtype != "float32":
        model = jaxrec.serve.quantize(model, dtype=dtype)
    path = write(tmp_path / "model", model, make_batch(50), ids_per_sample=4)
    batch = make_batch(20)
    answers = cpp.predict(path, [json.dumps(cpp.columns(*batch))])
    np.testing.assert_allclose(answers.lines[0]["score"], model(*batch), rtol=1e-5, atol=1e-5)


@needs_runtime
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_max_pooling_and_padding_ids(dtype, tmp_path):
    model = poolings.Model()
    if dtype != "float32":
        model = jaxrec.serve.quantize(model, dtype=dtype)
    path = write(tmp_path / "model", model, (poolings.make_batch(),), ids_per_sample=4)
    batch = poolings.make_batch(20)
    answers = cpp.predict(path, [json.dumps(cpp.columns(batch))])
    assert answers.code == 0, answers.error
    model.eval()
    for found, expected in zip(answers.lines[0].values(), model(batch), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


class Types(nnx.Module):
    """A model with inputs and outputs of all kinds, nested."""

    def __init__(self, rngs: nnx.Rngs):
        self.embeddings = collection(rngs)

    def __call__(self, inputs, features):
        outputs = {
            name: jnp.asarray(array) + jnp.ones((), array.dtype)
            for name, array in inputs.items()
            if array.dtype != bool
        }
        pooled = self.embeddings(features).values
        return {"pooled": pooled, "inverse": ~inputs["is_new"], "sums": [outputs, pooled.sum(1)]}


@needs_runtime
def test_types_and_nested_outputs(tmp_path):
    rng = np.random.default_rng(0)
    inputs = {
        "is_new": rng.random(5) < 0.5,
        "int8": rng.integers(-128, 127, (5, 2)).astype(np.int8),
        "int32": rng.integers(-(2**31), 2**31 - 1, 5).astype(np.int32),
        "uint16": rng.integers(0, 2**16 - 1, (5, 1, 2)).astype(np.uint16),
        "float16": np.float16([0.1, -7e-8, 6e-6, 1e-3, 60000]),
        "bfloat16": jnp.asarray(rng.standard_normal((5, 2)), jnp.bfloat16),
    }
    features = dlrm().batch(5)[1]
    model = write(tmp_path / "model", Types(nnx.Rngs(0)), (inputs, features))
    columns = {name: np.asarray(array).tolist() for name, array in inputs.items()}
    # More digits than the type has: they are rounded as NumPy rounds.
    columns["float16"] = [0.1, -7e-8, 6e-6, 1e-3, 60000]
    columns["int32"] = [float(number) for number in columns["int32"]]
    expected = jaxrec.serve.load(model).predict(inputs, features)
    columns |= features.to_lists()
    wrong = [{"int8": [[1.0, 128.0]] * 5}, {"int8": [[1.0, 1.5]] * 5}]
    line, *refused = cpp.predict(model, [json.dumps(columns | each) for each in ({}, *wrong)]).lines
    assert [each["error"] for each in refused] == [
        "column 'int8', sample 0: 128.0 does not fit int8",
        "column 'int8', sample 0: it must be an array of int8, got 1.5",
    ]
    names = {"inverse", "pooled", "sums.1", *(f"sums.0.{name}" for name in inputs)}
    assert set(line) == names - {"sums.0.is_new"}
    assert line["inverse"] == (~inputs["is_new"]).tolist()
    np.testing.assert_allclose(line["pooled"], expected["pooled"], rtol=1e-6)
    for name, array in expected["sums"][0].items():
        read_as = np.float32 if "float" in name else array.dtype
        answer = np.asarray(line[f"sums.0.{name}"], read_as).astype(array.dtype)
        assert (answer == array).all(), name


@needs_runtime
@pytest.mark.parametrize("threads", ["1", "3"])
def test_joined_requests_keep_their_order(exported, threads):
    case = dlrm()
    batches = [case.batch(samples) for samples in (1, 2, 3, 9, 17) * 8]
    lines = [json.dumps(cpp.columns(*batch)) for batch in batches]
    lines.insert(7, json.dumps(request() | {"user": [[50], []]}))
    lines.insert(0, json.dumps({name: [] for name in request()}))  # no samples
    answers = cpp.predict(exported, lines, "--threads", threads, "--max-delay-us", "5000")
    assert answers.code == 1
    assert answers.lines.pop(0) == {"score": []}
    assert "user" in answers.lines.pop(7)["error"]
    for batch, line in zip(batches, answers.lines, strict=True):
        np.testing.assert_allclose(line["score"], case.expected(*batch), rtol=1e-5, atol=1e-5)


ROWS = {"user": 50, "tags": 30}
BAD_REQUESTS = {
    "an id of no row": (
        {"tags": [[1], [2, 30]]},
        "feature 'tags', sample 1: id 30 is outside [0, 30), the ids of its table",
    ),
    "a negative id": (
        {"user": [[-1], []]},
        "feature 'user', sample 0: id -1 is outside [0, 50), the ids of its table",
    ),
    "an id of 64 bits": (
        {"user": [[], [2**64 - 1]]},
        f"feature 'user', sample 1: id {2**64 - 1} is outside [0, 50), the ids of its table",
    ),
    "too many ids": (
        {"user": [[], [0] * 1000]},
        "feature 'user', sample 1: 1000 ids, and the model takes ",
    ),
    "an id with a fraction": (
        {"user": [[1], [1.5]]},
        "feature 'user', sample 1: an id must be a whole number, got 1.5",
    ),
    "text for an id": (
        {"user": [["a"], []]},
        "feature 'user', sample 0: an id must be a whole number, got \"a\"",
    ),
    "no list of ids": ({"user": [1, 2]}, "feature 'user', sample 0: the ids must be a list, got 1"),
    "no list of samples": ({"user": 3}, "feature 'user' must be a list with an element for each"),
    "a missing feature": (
        {"user": None},
        "the request has no column 'user', which the model reads",
    ),
    "other numbers of samples": (
        {"user": [[1]]},
        "column 'user' has 1 samples, but column 'input0' has 2",
    ),
    "another shape": (
        {"input0": [[1, 2, 3], [1, 2]]},
        "column 'input0', sample 1: it must have the shape [samples, 3], got 2 elements",
    ),
    "a number for a row": (
        {"input0": [1, 2]},
        "column 'input0', sample 0: it must have the shape [samples, 3], got 1",
    ),
    "null": (
        {"input0": [[1, 2, 3], [1, None, 3]]},
        "column 'input0', sample 1: it must be an array of float32, got null",
    ),
    "a number that is too large": (
        {"input0": [[1, 2, 3], [1, 1e39, 3]]},
        "column 'input0', sample 1: 1e+39 does not fit float32",
    ),
    "weights": (
        {"user.weights": [[], []]},
        "the request has the column 'user.weights', and the model was exported for batches without",
    ),
}


@needs_runtime
def test_bad_requests_are_answered_with_their_error(exported):
    lines = []
    for change, _ in BAD_REQUESTS.values():
        columns = {**request(), **change}
        lines.append(
            json.dumps({key: value for key, value in columns.items() if value is not None})
        )
    texts = {
        "": "the request cannot be read: it is not JSON",
        "[1]": "a request must be an object of columns by name, got [1]",
        '{"input0": [[1, 2': "the request cannot be read: it is not JSON",
        "[" * 100_000: "the request cannot be read: it is nested more than 64 levels deep",
        '{"input0": "\\ud800"}': "the request cannot be read: it is not JSON",
        '{"input0": NaN}': "the request cannot be read: it is not JSON",
    }
    good = json.dumps(request())
    answers = cpp.predict(exported, [*lines, *texts, good])
    assert answers.code == 1
    assert f"{len(lines) + len(texts)} requests failed" in answers.error
    messages = [message for _, message in BAD_REQUESTS.values()] + list(texts.values())
    for line, message in zip(answers.lines[:-1], messages, strict=True):
        assert line["error"].startswith(message)
    assert len(answers.lines[-1]["score"]) == 2


@needs_runtime
@pytest.mark.parametrize("name", ["an id of no row", "too many ids"])
def test_errors_are_those_of_python(exported, name):
    columns = {**request(), **BAD_REQUESTS[name][0]}
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {key: columns[key] for key in ("user", "item", "tags")}
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011
        jaxrec.serve.load(exported).predict(np.float32(columns["input0"]), batch)
    (line,) = cpp.predict(exported, [json.dumps(columns)]).lines
    assert line["error"] == str(error.value)


def cut(model: pathlib.Path, file: str, size: int) -> None:
    content = (model / file).read_bytes()
    (model / file).write_bytes(content[:size])


def flip(model: pathlib.Path, file: str) -> None:
    content = bytearray((model / file).read_bytes())
    content[len(content) // 2] ^= 1
    (model / file).write_bytes(content)


def set_program(content: dict, **fields) -> None:
    content["programs"][0] |= fields


DAMAGES = {
    "no manifest": (
        lambda model: (model / "manifest.json").unlink(),
        "is not an exported model: manifest.json is missing",
    ),
    "manifest cut short": (
        lambda model: cut(model, "manifest.json", 500),
        "manifest.json cannot be used: it is not JSON",
    ),
    "manifest altered": (
        lambda model: flip(model, "manifest.json"),
        "manifest.json cannot be used",
    ),
    "table cut short": (
        lambda model: cut(model, "tables/0.npy", 300),
        "tables/0.npy has 300 bytes",
    ),
    "table altered": (
        lambda model: flip(model, "tables/0.npy"),
        "tables/0.npy does not have the bytes of the export",
    ),
    "program altered": (
        lambda model: flip(model, "programs/cpu-8.mlirbc"),
        "programs/cpu-8.mlirbc does not have the bytes of the export",
    ),
    "program missing": (
        lambda model: (model / "programs/cpu-8.mlirbc").unlink(),
        "programs/cpu-8.mlirbc cannot be read: No such file or directory",
    ),
    "later format": (
        lambda model: write_manifest(model, lambda each: each.update(format="jaxrec model 2")),
        "its format is 'jaxrec model 2', and this program reads 'jaxrec model 1'",
    ),
    "unknown field": (
        lambda model: write_manifest(model, lambda each: each.update(colour="red")),
        "'colour' is not a field that this version knows",
    ),
    "file outside": (
        lambda model: write_manifest(
            model, lambda each: each["files"].update({"../x": {"bytes": 0, "crc32": []}})
        ),
        "it names the file '../x', outside of the model's folder",
    ),
    "earlier export": (
        lambda model: write_manifest(model, lambda each: set_program(each, stablehlo=None)),
        "programs/cpu-1.jax has no StableHLO beside it",
    ),
    "later kernels": (
        lambda model: write_manifest(
            model, lambda each: set_program(each, targets=["jaxrec.pooled_lookup.v9"])
        ),
        "later version of jaxrec exported the model",
    ),
    "foreign kernels": (
        lambda model: write_manifest(model, lambda each: set_program(each, targets=["system"])),
        "programs/cpu-1.jax calls system: it is not a function of jaxrec's native library",
    ),
    "undeclared kernels": (
        lambda model: write_manifest(model, lambda each: set_program(each, targets=[])),
        "programs/cpu-1.mlirbc cannot be used: it calls jaxrec.flatten_bags.v1, which the manifest",
    ),
    "foreign calls": (
        lambda model: edit_programs(model, with_target("xla_ffi_python_cpu_callback")),
        "programs/cpu-1.mlirbc cannot be used: it calls xla_ffi_python_cpu_callback, which jaxrec "
        "does not know",
    ),
    "transfers": (
        lambda model: edit_programs(model, with_infeed),
        "programs/cpu-1.mlirbc cannot be used: it calls infeed_v1, which jaxrec does not know",
    ),
    "text": (
        lambda model: edit_programs(model, str, is_text=True),
        "programs/cpu-1.mlirbc cannot be used: it is not MLIR bytecode",
    ),
    "other platform": (
        lambda model: write_manifest(model, lambda each: set_program(each, platform="cuda")),
        "has no program for 1 samples on CPUs",
    ),
}


@needs_runtime
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_models_are_refused(name, damaged):
    damage, message = DAMAGES[name]
    damage(damaged)
    answers = cpp.predict(damaged, [json.dumps(request())])
    assert (answers.code, answers.lines) == (1, [])
    assert message in answers.error
    assert str(damaged) in answers.error


@needs_runtime
def test_models_of_earlier_versions_are_refused():
    answers = cpp.predict(RECORDED / "int8")
    assert answers.code == 1
    assert "an earlier jaxrec exported the model; export it again" in answers.error


@needs_runtime
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugin": "/missing.so"}, "/missing.so: cannot open shared object file"),
        ({"plugin": str(cpp.NATIVE_LIBRARY)}, "is no PJRT plugin: it lacks GetPjrtApi"),
        ({"plugin": ""}, "no PJRT plugin is given"),
        ({"native_library": "/missing.so"}, "/missing.so: cannot open shared object file"),
        ({"native_library": ""}, "jaxrec's native library is missing"),
    ],
    ids=["no plugin there", "another library", "no plugin", "no library there", "no library"],
)
def test_missing_libraries(exported, options, message):
    answers = cpp.predict(exported, **options)
    assert (answers.code, answers.lines) == (1, [])
    assert message in answers.error


@needs_runtime
@pytest.mark.parametrize("with_requests", [False, True], ids=["drawn", "given"])
def test_benchmark(exported, with_requests, tmp_path):
    options = ["--benchmark", "--batch", "1", "20", "--seconds", "0.05", "--threads", "2"]
    if with_requests:
        (tmp_path / "requests").write_text(json.dumps(request(3)) + "\n")
        options += ["--input", str(tmp_path / "requests")]
    answers = cpp.predict(exported, [], *options)
    assert answers.code == 0, answers.error
    assert [line["batch"] for line in answers.lines] == [1, 20]
    for line in answers.lines:
        assert 0 < line["p50_us"] <= line["p99_us"]
        assert line["samples_per_s"] > 0


@needs_runtime
def test_wrong_options_are_usage_errors(exported):
    assert cpp.predict(exported, [], "--threads", "0").code == 2
    assert cpp.predict(exported, [], "--input", "/missing").code == 1


@needs_runtime
def test_other_projects_use_the_installed_library(exported, tmp_path):
    prefix, build = tmp_path / "installed", tmp_path / "build"
    install = ["cmake", "--install", str(cpp.build_programs()), "--prefix", str(prefix)]
    configure = ["cmake", "-S", str(cpp.SOURCES / "examples"), "-B", str(build)]
    configure += [f"-DCMAKE_PREFIX_PATH={prefix}"]
    for command in (install, configure, ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert (prefix / "bin/jaxrec_predict").is_file()
    batch = dlrm().batch(3)
    arguments = [f"{cpp.PJRT}/plugin.so", str(cpp.NATIVE_LIBRARY), str(exported)]
    done = subprocess.run(
        [str(build / "score"), *arguments, json.dumps(cpp.columns(*batch))],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        check=True,
    )
    expected = dlrm().expected(*batch)
    np.testing.assert_allclose(json.loads(done.stdout)["score"], expected, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", ["unweighted", "weighted"])
def test_changed_manifests_and_requests_never_crash(kind, exported, tmp_path):
    model, make = exported, dlrm().batch
    if kind == "weighted":
        model = write(tmp_path / "model", Ranker(nnx.Rngs(0)), make_batch(50), ids_per_sample=4)
        make = make_batch
    lines = [json.dumps(cpp.columns(*make(samples))) for samples in (1, 3, 9)]
    (tmp_path / "requests").write_text("\n".join(lines) + "\n")
    arguments = [str(model), str(tmp_path / "requests"), "2000", "1"]
    done = subprocess.run([str(cpp.build_fuzz()), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("2000 runs")
