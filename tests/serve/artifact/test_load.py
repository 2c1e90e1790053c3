"""Exported models that are loaded: recordings of earlier versions, damage, raw columns, threads."""

from __future__ import annotations

import concurrent.futures
import pathlib
import shutil

import jax
import numpy as np
import pyarrow as pa
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.data import DataError, Schema, learn_encoder
from jaxrec.embed.kernels import cpu
from jaxrec.serve import ArtifactError, export, load
from jaxrec.serve.artifact.manifest import FORMAT
from tests.fuzz import max_examples
from tests.serve.artifact.edited import write_manifest
from tests.serve.models import dlrm, features
from tests.serve.record import ATTENTION, DTYPES, RECORDED, make_batch, make_sequences


@pytest.fixture
def recorded(tmp_path) -> pathlib.Path:
    """A copy of an exported model, to be damaged."""
    return pathlib.Path(shutil.copytree(RECORDED / "int8", tmp_path / "model"))


@pytest.mark.jax_version
@pytest.mark.parametrize("name", [*DTYPES, ATTENTION])
def test_recordings_have_the_scores_of_their_time(name):
    served = load(RECORDED / name)
    assert served.manifest.jax == "0.10.2"  # the oldest that is supported
    assert served.batch_sizes == (1, 8)
    expected = np.load(RECORDED / f"{name}.npy")
    batch = make_sequences(20) if name == ATTENTION else make_batch(20)
    np.testing.assert_allclose(served.predict(*batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.jax_version
def test_recordings_call_the_first_version_of_each_exported_target():
    called = {
        target
        for name in (*DTYPES, ATTENTION)
        for program in load(RECORDED / name).manifest.programs
        for target in program.targets
    }
    primitives = ("pooled_lookup", "flatten_bags", "row_lookup", "attention")
    packed = ("packed_pooled_lookup", "packed_row_lookup")
    assert called == {f"jaxrec.{name}.v1" for name in (*primitives, *packed)}


@pytest.mark.jax_version
def test_tables_stay_in_their_files():
    served = load(RECORDED / "float32")
    (rows, *_) = (
        array
        for array, stored in zip(
            served.variables.arrays.values(), served.manifest.arrays, strict=True
        )
        if stored.is_mapped
    )
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if str(RECORDED / "float32") in line]
    where = rows.unsafe_buffer_pointer()
    assert any(int(start, 16) <= where < int(stop, 16) for start, stop in spans)


@pytest.mark.jax_version
def test_warm_up_compiles_all_sizes():
    served = load(RECORDED / "int8")
    served.warm_up()
    assert set(served._compiled) == {1, 8}


@pytest.mark.jax_version
def test_several_threads_predict():
    served = load(RECORDED / "float32")
    batches = [make_batch(samples) for samples in range(1, 25)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda batch: served.predict(*batch), batches))
    for scores, batch in zip(together, batches, strict=True):
        np.testing.assert_array_equal(scores, served.predict(*batch))


def test_no_samples_have_no_scores():
    dense, ids = make_batch(3)
    none = ids.from_lists({key: [] for key in ids.keys}, weights={key: [] for key in ids.keys})
    assert load(RECORDED / "float32").predict(dense[:0], none).shape == (0,)


def test_arguments_are_counted():
    with pytest.raises(TypeError, match=r"takes 2 arguments for batch\[0\], batch\[1\], got 1"):
        load(RECORDED / "float32").predict(make_batch(2))


def test_ids_outside_of_their_table():
    dense, ids = make_batch(12)
    values = np.array(ids.values)
    start = ids.capacities[0]  # of the second feature, "user"
    values[start + int(ids["user"].lengths[:10].sum())] = 30
    bad = jaxrec.KeyedJaggedArray(
        values, ids.lengths, ids.weights,
        keys=ids.keys, capacities=ids.capacities, strides=ids.strides,
    )  # fmt: skip
    sample = 10 + int(np.argmax(np.asarray(ids["user"].lengths)[10:] > 0))
    with pytest.raises(ValueError, match=rf"'user', sample {sample}: id 30 is outside \[0, 30\)"):
        load(RECORDED / "float32").predict(dense, bad)


FILES = sorted(
    path.relative_to(RECORDED / "int8").as_posix() for path in (RECORDED / "int8").rglob("*.*")
)


@pytest.mark.parametrize("file", FILES)
def test_missing_and_truncated_files_are_named(recorded, file):
    content = (recorded / file).read_bytes()
    (recorded / file).write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=file):
        load(recorded)
    (recorded / file).unlink()
    with pytest.raises(ArtifactError, match=file):
        load(recorded)


@given(data=st.data())
@settings(max_examples=max_examples(200))
def test_altered_files_are_named(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "altered"
    if not path.exists():
        shutil.copytree(RECORDED / "int8", path)
    file = data.draw(st.sampled_from(FILES))
    before = (path / file).read_bytes()
    after = bytearray(before)
    for _ in range(data.draw(st.integers(1, 3))):
        after[data.draw(st.integers(0, len(after) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del after[data.draw(st.integers(0, len(after) - 1)) :]
    (path / file).write_bytes(after)
    try:
        is_same = load(path).manifest == load(RECORDED / "int8", verify=False).manifest
        said = ""
    except ArtifactError as error:
        is_same, said = False, str(error)
    finally:
        (path / file).write_bytes(before)
    if before == after or file == "manifest.json":  # where blanks may differ
        assert is_same or file in said
    else:
        assert file in said


def test_bytes_that_are_no_manifest(recorded):
    for content in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format": 1, "crc32": "0"}'):
        (recorded / "manifest.json").write_bytes(content)
        with pytest.raises(ArtifactError, match=r"manifest.json cannot be used"):
            load(recorded)


CHANGES = {
    "format": (lambda m: m.update(format="jaxrec model 9"), f"'jaxrec model 9'.* reads '{FORMAT}'"),
    "field missing": (lambda m: m.pop("tables"), "missing required field `tables`"),
    "field unknown": (lambda m: m.update(extra=1), "unknown field `extra`"),
    "type": (lambda m: m["batch"]["sizes"][0].update(samples="1"), r"`int`, got `str`.*samples"),
    "sizes": (lambda m: m["batch"]["sizes"].reverse(), r"batch sizes are \[8, 1\]"),
    "no size": (lambda m: m["batch"].update(sizes=[]), r"batch sizes are \[\]"),
    "capacities": (
        lambda m: m["batch"]["sizes"][0].update(capacities=[[8]]),
        "1 capacities for 4 features",
    ),
    "ragged": (
        lambda m: m["batch"]["sizes"][0].update(capacities=[]),
        "capacities of 0 inputs, but 1 are ragged",
    ),
    "inputs": (lambda m: m["batch"]["inputs"].pop(), "its structure has 2 inputs, and it lists 1"),
    "file": (lambda m: m["files"].pop("programs/cpu-1.jax"), "not among its files"),
    "folder": (
        lambda m: m["files"].update({"../x": m["files"]["programs/cpu-1.jax"]}),
        r"names the file '../x', outside",
    ),
    "outputs": (lambda m: m["outputs"].pop(), "its structure has 1 outputs, and it lists 0"),
    "program": (
        lambda m: m["programs"][0].update(samples=3),
        "3 samples, but the batch sizes are",
    ),
    "array": (lambda m: m["arrays"][0].update(shape=[3, 4]), r"tables/0.npy holds uint8 of"),
    "program missing": (lambda m: m["programs"].pop(), "programs for cpu, .* export the model"),
    "target": (
        lambda m: m["programs"][0].update(targets=["jaxrec.row_lookup.v99"]),
        "calls jaxrec.row_lookup.v99: a later version of jaxrec",
    ),
    "checksums": (
        lambda m: m["files"]["programs/cpu-1.jax"].update(crc32=[]),
        "programs/cpu-1.jax has 0 checksums",
    ),
    "encoder": (lambda m: m.update(has_encoder=True), "features cannot be used"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_manifests_that_do_not_fit(recorded, what):
    change, message = CHANGES[what]
    write_manifest(recorded, change)
    with pytest.raises(ArtifactError, match=message):
        load(recorded)


def test_checksums_are_left_out_on_request(recorded):
    rows = recorded / "tables/0.npy"
    content = bytearray(rows.read_bytes())
    content[-1] ^= 1
    rows.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"tables/0.npy does not have the bytes"):
        load(recorded)
    load(recorded, verify=False)
    content[0] ^= 1
    rows.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"tables/0.npy is not an npy file"):
        load(recorded, verify=False)


@pytest.mark.jax_version
def test_programs_that_jax_cannot_read(recorded):
    file = recorded / "programs/cpu-8.jax"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(ArtifactError, match=r"cpu-8.jax cannot be read by JAX .* with JAX 0.10.2"):
        load(recorded, verify=False)


def test_folders_that_are_no_model(tmp_path):
    for path in (tmp_path, tmp_path / "missing", pathlib.Path(__file__)):
        with pytest.raises(ArtifactError, match="is not an exported model"):
            load(path)


@pytest.mark.jax_version
def test_machines_without_the_native_library(monkeypatch):
    monkeypatch.setattr(cpu, "_load", lambda: "the native library was not built")
    with pytest.raises(ArtifactError, match=r"calls jaxrec.*v1, which is missing here: the native"):
        load(RECORDED / "float32")


def test_programs_without_the_native_library(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_load", lambda: "the native library was not built")
    case = dlrm()
    export(case.model, tmp_path / "model", batch_sizes=(4,), platforms=("cpu",))
    batch = case.batch(4)
    scores = load(tmp_path / "model").predict(*batch)
    np.testing.assert_allclose(scores, case.expected(*batch), rtol=1e-5, atol=1e-5)


def columns(rows: int) -> pa.Table:
    rng = np.random.default_rng(rows)
    cities = np.array(["Rome", "Oslo", "Bonn", "Bern", "Kiew"])
    return pa.table(
        {
            "label": rng.integers(0, 2, rows),
            "age": rng.integers(18, 80, rows),
            "income": rng.lognormal(10, 1, rows),
            "city": pa.array(cities[rng.integers(0, 5, rows)], mask=rng.random(rows) < 0.1),
            "tags": [
                [f"t{i}" for i in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(rows)
            ],
            "item": rng.integers(-(2**62), 2**62, rows),
        }
    )


SCHEMA = {
    "label": "label",
    "dense": {"age": {"transform": "standardize"}, "income": {"transform": "log1p"}},
    "categorical": {
        "city": {},
        "tags": {"pooling": "mean"},
        "item": {"encoding": "hash", "num_embeddings": 50},
    },
}


@pytest.fixture(scope="module")
def of_columns(tmp_path_factory):
    """A model of raw columns, its encoder and its export."""
    path = tmp_path_factory.mktemp("columns") / "model"
    encoder = learn_encoder(Schema.from_dict(SCHEMA), [columns(300)])
    rngs = nnx.Rngs(0)
    tables = [
        jaxrec.EmbeddingBagConfig(name, encoder.table_rows[name], 4, initializer="normal")
        for name in encoder.schema.categorical
    ]
    model = jaxrec.nn.DLRM(
        jaxrec.EmbeddingBagCollection(tables, rngs=rngs),
        num_dense=2, bottom_layer_sizes=(4,), top_layer_sizes=(4, 1), rngs=rngs,
    )  # fmt: skip
    export(model, path, encoder=encoder, batch_sizes=(1, 16), platforms=("cpu",))
    return model, encoder, path


def test_raw_columns(of_columns):
    model, encoder, path = of_columns
    served = load(path)
    table = columns(37).drop_columns("label")
    batch = encoder.batch(table)
    expected = nnx.jit(lambda model, *batch: model(*batch))(model, batch.dense, batch.features)
    given = {name: table[name].to_pylist() for name in table.column_names}
    for scores in (served.predict_columns(table), served.predict_columns(given)):
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)


def test_raw_columns_that_are_wrong(of_columns):
    served = load(of_columns[2])
    with pytest.raises(DataError, match="no columns 'city'"):
        served.predict_columns(columns(2).drop_columns("city"))
    with pytest.raises(DataError, match=r"row 1 .*'income': the number is nan"):
        served.predict_columns({**columns(2).to_pydict(), "income": [1.0, float("nan")]})
    with pytest.raises(TypeError, match="exported without an encoder of columns; call predict"):
        load(RECORDED / "int8").predict_columns(columns(2))


def test_damage_of_the_encoder_is_named(of_columns, tmp_path):
    path = pathlib.Path(shutil.copytree(of_columns[2], tmp_path / "model"))
    with (path / "features/vocabularies/city.parquet").open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(ArtifactError, match=r"city.parquet does not have the bytes that"):
        load(path)


def test_features_of_the_model_alone_are_needed(tmp_path):
    model = jaxrec.EmbeddingBagCollection(
        [jaxrec.EmbeddingBagConfig("user", 50, 4)], rngs=nnx.Rngs(0)
    )
    export(model, tmp_path / "model", batch_sizes=(4,), platforms=("cpu",))
    served = load(tmp_path / "model", device=jax.devices()[1])
    np.testing.assert_array_equal(
        served.predict(features(3))["user"], model(features(3).select(["user"]))["user"]
    )


def test_a_file_that_has_grown(recorded):
    with (recorded / "dense/2.npy").open("ab") as file:
        file.write(b"\0")
    for verify in (True, False):
        with pytest.raises(ArtifactError, match=r"dense/2.npy has .* bytes, but .* were exported"):
            load(recorded, verify=verify)
