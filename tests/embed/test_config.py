"""Tables' configurations are checked when they are made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec

GOOD = {"name": "user", "num_embeddings": 10, "embedding_dim": 4}

BAD = {
    "empty_name": ({"name": ""}, "non-empty string"),
    "at_in_name": ({"name": "a@b"}, "without '@'"),
    "no_rows": ({"num_embeddings": 0}, "num_embeddings is an integer of 1 or more, got 0"),
    "float_rows": ({"num_embeddings": 10.0}, "num_embeddings is an integer"),
    "bool_rows": ({"num_embeddings": True}, "num_embeddings is an integer"),
    "no_columns": ({"embedding_dim": 0}, "embedding_dim is an integer of 1 or more, got 0"),
    "repeated_feature": ({"feature_names": ("f", "f")}, "occurs twice"),
    "empty_feature": ({"feature_names": ("",)}, "feature_names are strings"),
    "float64": ({"dtype": "float64"}, "dtype is one of float32, bfloat16, float16"),
    "int16": ({"dtype": np.int16}, "dtype is one of"),
    "no_dtype": ({"dtype": "floaty"}, "dtype is one of"),
    "initializer": ({"initializer": "gaussian"}, "initializer='gaussian' is not one of uniform"),
    "pooling": ({"pooling": "min"}, "pooling is 'sum', 'mean' or 'max', got 'min'"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_values(change, message):
    with pytest.raises(ValueError, match=message):
        jaxrec.EmbeddingBagConfig(**(GOOD | change))


def test_a_lone_string_is_no_sequence_of_features():
    with pytest.raises(TypeError, match=r"write \('clicks',\)"):
        jaxrec.EmbeddingBagConfig(**GOOD, feature_names="clicks")


def test_an_optimizer_must_be_a_row_optimizer():
    with pytest.raises(TypeError, match="row optimizer such as"):
        jaxrec.EmbeddingBagConfig(**GOOD, optimizer=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype(jnp.bfloat16)])
def test_configurations_are_values(dtype):
    config = jaxrec.EmbeddingConfig("user", np.int64(10), 1, ["f", "g"], dtype=dtype)
    same = jaxrec.EmbeddingConfig("user", 10, 1, ("f", "g"), dtype="bfloat16")
    assert config == same
    assert hash(config) == hash(same)


def test_initializer_may_be_a_function():
    jaxrec.EmbeddingConfig(**GOOD, initializer=jax.nn.initializers.normal(0.1))
