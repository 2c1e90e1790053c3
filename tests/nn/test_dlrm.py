from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import DLRM
from tests import golden


def make_dlrm(*, dims=(4, 4), bottom=(6, 4), top=(5, 1)):
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", 10, dim) for i, dim in enumerate(dims)]
    rngs = nnx.Rngs(0)
    return DLRM(
        jaxrec.EmbeddingBagCollection(tables, rngs=rngs),
        num_dense=3,
        bottom_layer_sizes=bottom,
        top_layer_sizes=top,
        rngs=rngs,
    )


def test_golden():
    (case,) = [case for name, case in golden.cases("modules") if name == "model_dlrm"]
    arrays = golden.load("modules", "model_dlrm")
    rngs = nnx.Rngs(0)
    embeddings = jaxrec.EmbeddingBagCollection(
        [
            jaxrec.EmbeddingBagConfig(
                table["name"], table["rows"], table["dim"], feature_names=table["features"]
            )
            for table in case["meta"]["tables"]
        ],
        rngs=rngs,
    )
    prefix = "p__sparse_arch__embedding_bag_collection__embedding_bags"
    for table in case["meta"]["tables"]:
        embeddings.load_table(table["name"], arrays[f"{prefix}__{table['name']}__weight"])
    model = DLRM(
        embeddings,
        num_dense=case["meta"]["dense_in_features"],
        bottom_layer_sizes=(6, 4),
        top_layer_sizes=(5, 1),
        rngs=rngs,
    )
    names = [f"dense_arch__model___mlp__{i}___linear" for i in range(2)]
    names += ["over_arch__model__0___mlp__0___linear", "over_arch__model__1"]
    for layer, name in zip([*model.bottom.layers, *model.top.layers], names, strict=True):
        layer.kernel.set_value(jnp.asarray(arrays[f"p__{name}__weight"].T))
        layer.bias.set_value(jnp.asarray(arrays[f"p__{name}__bias"]))
    features = jaxrec.KeyedJaggedArray.from_lengths(
        [str(key) for key in arrays["keys"]], arrays["values"], arrays["lengths"]
    )
    logits = model(jnp.asarray(arrays["dense_features"]), features)
    np.testing.assert_allclose(logits, arrays["out"][:, 0], **case["tolerance"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": (4, 8)}, r"one width.*'t0': 4, 't1': 8"),
        ({"bottom": (6, 5)}, r"tables' width, 4.*\(6, 5\)"),
        ({"bottom": ()}, "tables' width"),
        ({"top": (5, 2)}, r"one column, the logit.*\(5, 2\)"),
        ({"top": ()}, "one column"),
    ],
    ids=["widths", "bottom", "no-bottom", "top", "no-top"],
)
def test_sizes_must_fit(change, message):
    with pytest.raises(ValueError, match=message):
        make_dlrm(**change)
