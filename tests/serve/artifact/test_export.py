"""Exported models: their scores are those of the model, and errors say what cannot be exported."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.data import Schema, TableEncoder
from jaxrec.serve import ArtifactError, export, load, quantize
from tests.serve import models
from tests.serve.models import MODELS, NUM_DENSE, Several, clicks, dlrm, features

pytestmark = pytest.mark.jax_version

SIZES = {"batch_sizes": (8,), "platforms": ("cpu",)}


def close(scores, expected) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), scores, expected
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_model(tmp_path, name, dtype):
    case = MODELS[name]()
    if dtype != "float32":
        case = case._replace(model=quantize(case.model, dtype=dtype))
    export(
        case.model,
        tmp_path / "model",
        example=case.batch(100),
        function=case.function,
        batch_sizes=(1, 8) if dtype == "float32" else (8,),
        platforms=("cpu",),
    )
    served = load(tmp_path / "model")
    assert {table.row_format for table in served.manifest.tables} == {dtype}
    batch = case.batch(25)  # three times 8, and 1
    scores = served.predict(*batch)
    assert isinstance(scores, np.ndarray)
    close(scores, case.expected(*batch))


def test_a_model_on_a_mesh_is_exported(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrec.mesh.dense.MIN_SHARDED_SIZE", 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict(
        {
            "user": jaxrec.mesh.row_wise(),
            "item": jaxrec.mesh.table_wise(device=2),
            "tags": jaxrec.mesh.column_wise(devices=(0, 1)),
        }
    )
    sharded = jaxrec.shard(lambda: dlrm.__wrapped__().model, plan, mesh, dense=fsdp_where_divided)
    export(sharded, tmp_path / "model", **SIZES)
    # First values do not depend on the placement.
    close(load(tmp_path / "model").predict(*clicks(9)), dlrm().expected(*clicks(9)))


def fsdp_where_divided(path, form):
    is_divided = any(size % 4 == 0 for size in form.shape)
    return None if is_divided else jax.sharding.PartitionSpec()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_of_tables_that_numpy_lacks(tmp_path, dtype):
    config = jaxrec.EmbeddingBagConfig("user", 20, 8, dtype=dtype, initializer="normal")
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    export(model, tmp_path / "model", **SIZES)
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 2], [], [19]]})
    scores = load(tmp_path / "model").predict(batch)
    assert set(scores) == {"user"}
    np.testing.assert_array_equal(scores["user"], model(batch)["user"])


@pytest.mark.parametrize("dtype", ["int4", "int2", "float8", "float16"])
def test_formats_of_quantized_tables(tmp_path, dtype):
    model = quantize(models.collection(nnx.Rngs(0)), dtype=dtype, per_table={"user": "float32"})
    export(model, tmp_path / "model", **SIZES)
    scores = load(tmp_path / "model").predict(features(9))
    close(scores, model(features(9)).to_dict())


def test_inputs_and_outputs_in_dicts(tmp_path):
    model = Several(nnx.Rngs(0))
    batch = {"bias": np.arange(11.0), "features": features(11)}
    export(model, tmp_path / "model", example=batch, **SIZES)
    scores = load(tmp_path / "model").predict(dict(reversed(batch.items())))
    assert isinstance(scores["scores"], tuple)
    close(scores, model(batch))


def test_variables_that_no_output_reads_are_left_out(tmp_path):
    case = MODELS["two_tower"]()
    export(case.model, tmp_path / "model", example=case.batch(3), function=case.function, **SIZES)
    manifest = load(tmp_path / "model").manifest
    assert {table.name for table in manifest.tables} == {"user", "tags"}
    assert all("candidate" not in array.name for array in manifest.arrays)


def test_programs_for_gpus_are_made_without_one(tmp_path):
    export(dlrm().model, tmp_path / "model", batch_sizes=(2,))
    manifest = load(tmp_path / "model").manifest
    assert manifest.platforms() == ("cpu", "cuda")
    targets = {(each.platform, each.samples): each.targets for each in manifest.programs}
    assert targets == {("cuda", 2): (), ("cpu", 2): ("jaxrec.pooled_lookup.v1",)}
    export(dlrm().model, tmp_path / "model", batch_sizes=(2,), platforms=("cuda",))
    with pytest.raises(ArtifactError, match=r"programs for cuda.*platforms=\('cpu',\)"):
        load(tmp_path / "model")


def test_files_of_an_example(tmp_path):
    export(dlrm().model, tmp_path / "model", batch_sizes=(1, 8), platforms=("cpu",))
    files = {path.relative_to(tmp_path / "model").as_posix() for path in tmp_path.rglob("*.*")}
    content = json.loads((tmp_path / "model/manifest.json").read_text())
    assert files - {"manifest.json"} == content["files"].keys()
    assert content["batch"]["inputs"][1]["features"][0]["name"] == "user"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_exported_model_is_replaced(tmp_path):
    for rows in (20, 30):
        config = jaxrec.EmbeddingBagConfig("user", rows, 4)
        model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        export(model, tmp_path / "model", **SIZES)
    assert load(tmp_path / "model").manifest.tables[0].num_embeddings == 30


def test_nothing_else_is_replaced(tmp_path):
    (tmp_path / "precious.txt").write_text("data")
    for path in (tmp_path, tmp_path / "precious.txt"):
        with pytest.raises(FileExistsError, match="is not an exported model; give another path"):
            export(models.collection(nnx.Rngs(0)), path, **SIZES)
    (tmp_path / "empty").mkdir()
    export(models.collection(nnx.Rngs(0)), tmp_path / "empty", **SIZES)


def test_a_failed_export_leaves_nothing(tmp_path):
    def mean(model, dense, features):
        return model(dense, features).mean()

    with pytest.raises(ValueError, match=r"output has the shape \(\) for a batch of 8 samples"):
        export(dlrm().model, tmp_path / "model", function=mean, **SIZES)
    assert list(tmp_path.iterdir()) == []


class Unknown(nnx.Module):
    def __init__(self):
        self.embeddings = models.collection(nnx.Rngs(0))

    def __call__(self, price, stock, features):
        return self.embeddings(features).values[:, 0]


def dynamic() -> nnx.Module:  # a model of its own: its tables are replaced
    model = models.collection(nnx.Rngs(0))
    return jaxrec.tier.make(lambda: model, {"user": jaxrec.tier.Dynamic()})


def encoder_of(rows: int, encoding: str = "ids") -> TableEncoder:
    columns = {"user": {"encoding": encoding, "num_embeddings": rows}}
    return TableEncoder(Schema.from_dict({"label": "label", "categorical": columns}), {}, {}, {})


ONES = np.ones((2, NUM_DENSE), np.float32)
WRONG = {
    "no module": (lambda: 3, {}, TypeError, "takes a flax.nnx.Module, got int"),
    "open vocabulary": (dynamic, {}, TypeError, "tables .*'user'.* all of their rows"),
    "unknown inputs": (
        Unknown,
        {},
        ValueError,
        r"the inputs \(price, stock, features\) do not follow from Unknown; give .* example=",
    ),
    "platform": (dlrm, {"platforms": ("tpu",)}, ValueError, "platform 'tpu' is not one of 'cpu'"),
    "no platform": (dlrm, {"platforms": ()}, ValueError, "platforms are some of cpu, cuda"),
    "batch size": (dlrm, {"batch_sizes": (0, 4)}, ValueError, "whole numbers of 1 or more"),
    "no batch size": (dlrm, {"batch_sizes": ()}, ValueError, "whole numbers of 1 or more"),
    "example of other sizes": (
        dlrm,
        {"example": (ONES, features(3))},
        ValueError,
        r"equally many samples, 1 or more; got 2 in batch\[0\], 3 in batch\[1\]",
    ),
    "no array": (dlrm, {"example": (3.0, features(3))}, TypeError, r"batch\[0\] is 3.0; a batch"),
    "text": (
        dlrm,
        {"example": (np.array(["a", "b"]), features(2))},
        TypeError,
        "numbers and bools",
    ),
    "raw ids": (
        dlrm,
        {"example": (ONES, jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]]}, id_bits=64))},
        ValueError,
        "has raw ids or slots",
    ),
    "unknown feature": (
        dlrm,
        {"ids_per_sample": {"usr": 3}},
        ValueError,
        "names 'usr', but the features are user, item, tags",
    ),
    "encoder and example": (
        dlrm,
        {"encoder": encoder_of(50), "example": (ONES, features(2))},
        ValueError,
        "the inputs are those of the encoder; leave the example out",
    ),
    "encoder of other tables": (
        dlrm,
        {"encoder": encoder_of(51)},
        ValueError,
        "the encoder has 51 rows for column 'user', but the model's table has 50",
    ),
    "encoder of raw ids": (
        dlrm,
        {"encoder": encoder_of(50, "dynamic")},
        ValueError,
        "columns 'user' have open vocabularies",
    ),
    "ids per sample": (dlrm, {"ids_per_sample": {"user": -1}}, ValueError, "a number above 0"),
    "output is text": (
        dlrm,
        {"function": lambda model, dense, features: "score"},
        TypeError,
        "output is a str; an exported function returns arrays",
    ),
    "output without samples": (
        dlrm,
        {"function": lambda model, dense, features: model(dense, features)[:1]},
        ValueError,
        r"output has the shape \(1,\) for a batch of 8 samples",
    ),
    "callback": (
        dlrm,
        {
            "function": lambda model, dense, features: jax.pure_callback(
                np.sin, jax.ShapeDtypeStruct(dense.shape[:1], "float32"), model(dense, features)
            )
        },
        ValueError,
        "cannot be exported: serialization of host_callbacks",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused(tmp_path, unchecked, what):
    make, options, error, message = WRONG[what]
    model = make()
    model = model.model if isinstance(model, models.Case) else model
    with pytest.raises(error, match=re.compile(message, re.IGNORECASE)):
        export(model, tmp_path / "model", **(SIZES | options))
    assert list(tmp_path.iterdir()) == []
