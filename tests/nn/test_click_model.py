from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import LinearPart
from jaxrec.nn.click_model import common_width, num_columns, num_features

TABLES = (
    jaxrec.EmbeddingBagConfig("user", 5, 4, feature_names=("user", "friend")),
    jaxrec.EmbeddingBagConfig("item", 7, 4),
)
WIDE = jaxrec.EmbeddingBagConfig("wide", 7, 6)


def test_one_width():
    assert common_width("DLRM", TABLES) == 4
    with pytest.raises(ValueError, match=r"DLRM's tables .* got \{.*'item': 4, 'wide': 6\}"):
        common_width("DLRM", (*TABLES, WIDE))


def test_sizes_are_those_of_the_pooled_output():
    tables = (*TABLES, WIDE)
    bags = jaxrec.EmbeddingBagCollection(tables, optimizer=jaxrec.optim.sgd(0.1), rngs=nnx.Rngs(0))
    names = ("user", "friend", "item", "wide")
    batch = jaxrec.KeyedJaggedArray.from_lists({name: [[1]] for name in names})
    pooled = bags(batch)
    assert num_columns(bags) == pooled.values.shape[1] == 18
    assert num_features(bags) == len(pooled.keys) == 4


def test_the_old_name_of_a_lookup_says_the_new_one():
    weights = jaxrec.EmbeddingBagCollection(
        [jaxrec.EmbeddingBagConfig("user", 5, 1)], rngs=nnx.Rngs(0)
    )
    model = LinearPart(weights, rngs=nnx.Rngs(0))
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2, 3]]})
    with pytest.warns(DeprecationWarning, match="LinearPart.look_up is called lookup now"):
        found = model.look_up(batch)
    np.testing.assert_array_equal(found, model.lookup(batch))
