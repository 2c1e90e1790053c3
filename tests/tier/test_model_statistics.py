"""Statistics of a model by table, counted again by Python."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Dynamic, ahead, lru, make
from jaxrec.tier.model_statistics import statistics, totals
from tests.tier import models

NAMES = ("item", "query", "item_wide")
ROOM = 170

pytestmark = pytest.mark.filterwarnings("ignore:.* thrashes")


@pytest.fixture(scope="module")
def trained():
    batches, _ = models.stream(30, 400)
    settings = {name: Dynamic(eviction=lru(), admit_after=2) for name in NAMES}
    model = make(lambda: models.Ranker(ROOM + 1, "sgd"), settings)
    for _ in ahead(model, batches, look_ahead=2):
        pass
    return model, [features for features, _ in batches]


def test_counts_of_each_table(trained):
    """Sums over batches of what Python counts; evictions follow from the others."""
    model, batches = trained
    values = statistics(model)
    assert values.keys() == set(NAMES)
    assert values["item"] == values["item_wide"]
    for table, keys in (("item", ["item"]), ("query", ["query", "context"])):
        of_table = values[table]
        of_batches = [
            np.concatenate([models.ids_of(features, key) for key in keys]).tolist()
            for features in batches
        ]
        assert of_table["lookups"] == sum(map(len, of_batches))
        assert of_table["resident"] == of_table["admitted"] - of_table["evicted"]
        assert of_table["load"] == of_table["resident"] / ROOM
        assert of_table["hit_rate"] == of_table["hits"] / of_table["lookups"]
        assert of_table["new"] >= of_table["admitted"] > ROOM > 0
        assert of_table["evicted"] > 0
        # Refused are ids of batches in which they have no row, not even a new one.
        sightings = collections.Counter()
        for ids in of_batches:
            sightings.update(ids)
        assert 0 < of_table["refused"] <= sum(n for n in sightings.values())
        assert of_table["refused"] >= sum(n == 1 for n in sightings.values())


def test_totals(trained):
    each = statistics(trained[0])
    summed = totals(trained[0])
    for name in ("lookups", "hits", "new", "admitted", "evicted", "refused", "resident"):
        assert summed[name] == each["item"][name] + each["query"][name]
    assert summed["load"] == summed["resident"] / (2 * ROOM)
    assert summed["hit_rate"] == summed["hits"] / summed["lookups"]


def test_results_are_the_callers(trained):
    statistics(trained[0])["item"]["lookups"] = -1
    assert statistics(trained[0])["item"]["lookups"] > 0


def test_other_models_are_an_error():
    config = jaxrec.EmbeddingBagConfig("item", num_embeddings=10, embedding_dim=4)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    for function in (statistics, totals):
        with pytest.raises(TypeError, match="no table with an open vocabulary; make it with"):
            function(model)
