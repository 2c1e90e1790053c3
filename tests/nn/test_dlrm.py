from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import DLRM
from jaxrec.nn.click_model import check_dense


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims": (4, 8)}, r"one width.*'t0': 4, 't1': 8"),
        ({"bottom": (6, 5)}, r"tables' width, 4.*\(6, 5\)"),
        ({"bottom": ()}, "tables' width"),
        ({"top": (5, 2)}, r"ends with 1, the column of the logit.*\(5, 2\)"),
        ({"top": ()}, "top_layer_sizes ends with 1"),
    ],
    ids=["widths", "bottom", "no-bottom", "top", "no-top"],
)
def test_sizes_must_fit(change, message):
    with pytest.raises(ValueError, match=message):
        make_dlrm(**change)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4), "the model has 3 dense features, but the batch has 4; num_dense= of the model"),
        ((5, 3), "dense features of 5 samples, but ids of 2"),
        ((3,), r"dense features are \[batch, num_dense\], here \[2, 3\]; got .* shape \(3,\)"),
    ],
    ids=["width", "samples", "rank"],
)
def test_dense_features_must_fit(shape, message):
    features = jaxrec.KeyedJaggedArray.from_lists({"t0": [[1], [2]], "t1": [[3], []]})
    with pytest.raises(ValueError, match=message):
        make_dlrm()(jnp.ones(shape), features)
    with pytest.raises(ValueError, match=message):
        check_dense(np.ones(shape), 3, 2)
