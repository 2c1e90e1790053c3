"""The kinds of model that `jaxrec train` trains, on one small table."""

from __future__ import annotations

import inspect
import json
import shutil
from typing import get_args

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from flax import nnx
from rich.console import Console

import jaxrec
from jaxrec.arguments import ConfigError
from jaxrec.commands import main
from jaxrec.data import DataError, Shard, TableEncoder
from jaxrec.metrics import auc
from jaxrec.nn.sequence import SequenceModel
from jaxrec.train import load_model
from jaxrec.train.checkpoint.tree import saved_tree
from jaxrec.train.config import DataConfig, TrainConfig, load_config, parse_options
from jaxrec.train.models import KINDS, default_config, model_kind
from jaxrec.train.models.interactions import item_column, read_sequences, split_last
from jaxrec.train.models.kind import HeldOutBatches
from jaxrec.train.models.ranking import full_ranks, rank_values
from jaxrec.train.option_groups import ModelName

ROWS, USERS, ITEMS = 80, 8, 12
SMALL = [
    "--batch-size=32",
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=8",
    "--data.eval-fraction=0.2",
]
SEQUENCES = ["--user=user", "--item=item", "--time=when", "--batch-size=4", "--patience=0"]
SEQUENCES += ["--model.embedding-dim=4", "--model.max-length=6", "--epochs=2"]
REQUESTS = [*SEQUENCES[:3], "--label=click", "--batch-size=8", "--model.embedding-dim=4"]
REQUESTS += ["--ranker.dim=4", "--ranker.layers=1", "--data.table-rows=50", "--epochs=2"]
FEATURES = ["--exclude", "when", "stars"]
CLICKS = [*SMALL, "--label=click", *FEATURES, "buy"]

# Options of each kind, for `rows`.
OPTIONS = {
    **{name: [*CLICKS, "history"] for name in ("dlrm", "dcn_v2", "deepfm", "wide_deep", "wukong",
                                               "rankmixer", "masknet")},
    "finalmlp": [*CLICKS, "history", "--user=user", "--item=item"],
    "gdcn": [*CLICKS, "history"],
    **{name: [*CLICKS, "--history=history", "--item=item", "--model.max-length=2"]
       for name in ("din", "transact", "longer", "onetrans")},
    **{name: [*SMALL, "--label", "click", "stars", "--exclude", "when", "buy", "history"]
       for name in ("mmoe", "ple")},
    "pepnet": [*SMALL, "--label", "click", "stars", "--exclude", "when", "buy", "history",
               "--user=user", "--item=item", "--model.domain=user"],
    "two_tower": [*CLICKS, "history", "--item", "item", "price", "--user=user"],
    **{name: SEQUENCES for name in ("sasrec", "bert4rec")},
    "hstu_ranker": REQUESTS,
}  # fmt: skip


# Kinds that differ from a kind of the same family by their network alone.
ALIKE = ("dlrm", "wukong", "rankmixer", "masknet", "finalmlp", "gdcn", "transact", "longer")

# Default options of models of sequences.
DEFAULTS = inspect.unwrap(SequenceModel.__init__).__kwdefaults__


def table(seed=0):
    rng = np.random.default_rng(seed)
    item = rng.integers(0, ITEMS, ROWS)
    click = (rng.random(ROWS) < 0.2 + 0.6 * (item < 6)).astype(np.int8)
    history = [rng.integers(0, ITEMS, rng.integers(0, 4)).tolist() for _ in range(ROWS)]
    return pa.table(
        {
            "user": np.char.add("u", rng.integers(0, USERS, ROWS).astype(str)),
            "item": item,
            "history": pa.array(history, pa.list_(pa.int64())),
            "price": rng.lognormal(size=ROWS),
            "click": click,
            "buy": click * (rng.random(ROWS) < 0.5).astype(np.int8),
            "stars": 10 + 3 * click + rng.normal(size=ROWS),
            "when": rng.permutation(ROWS),
        }
    )


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "rows.parquet"
    pq.write_table(table(), path)
    return path


@pytest.fixture(scope="session")
def runs(rows, tmp_path_factory):
    """Function that returns a run of a kind: four steps and a checkpoint of each two."""
    directory = tmp_path_factory.mktemp("runs")

    def run(name):
        output = directory / name
        if not output.exists():
            options = [f"--data={rows}", f"--model={name}", "--epochs=2", *OPTIONS[name]]
            options += ["--checkpoint.every=2", "--checkpoint.keep-last=9", f"--output={output}"]
            assert main(["train", *options]) == 0
        return output

    return run


@pytest.fixture(scope="module", autouse=True)
def small_sequence_models():
    """Models of sequences have one block: runs treat each number of blocks alike."""
    with pytest.MonkeyPatch.context() as patch:
        assert {"num_blocks", "dropout_rate"} <= DEFAULTS.keys()
        patch.setitem(DEFAULTS, "num_blocks", 1)
        yield


def numbers(model, optimizer):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(saved_tree(model, optimizer, None))]


def kind_of(run):
    return model_kind(load_config(run / "config.yaml"), TableEncoder.load(run / "features"))


@pytest.mark.every_case
def test_the_names_of_the_command_line_are_those_of_the_kinds():
    assert get_args(ModelName) == tuple(KINDS) == tuple(OPTIONS)


@pytest.mark.every_case
def test_defaults_of_a_kind(tmp_path):
    assert default_config("dlrm") == TrainConfig()
    assert default_config("sasrec").data.batch_size == 64
    assert default_config("nothing") == TrainConfig()
    # A file's options come before the defaults of the kind that it names.
    (tmp_path / "run.yaml").write_text("{model: {name: sasrec}, data: {epochs: 7}}")
    config = load_config(tmp_path / "run.yaml", default_config("sasrec"))
    assert (config.data.epochs, config.data.batch_size) == (7, 64)


@pytest.mark.every_case
def test_options_of_earlier_versions(tmp_path):
    """A run without a label in its options, and with the name of the best value."""
    text = "{data: {label: null, weight: null}, checkpoint: {best_by: auc}, model: {name: dlrm}}"
    (tmp_path / "config.yaml").write_text(text)
    config = load_config(tmp_path / "config.yaml")
    assert config.data.label == ()
    assert config.checkpoint.best_by == "auc"


@pytest.mark.every_case
@pytest.mark.parametrize("name", ALIKE)
def test_networks_of_a_family_predict_rows(rows, name):
    """As traced: the loss, names and shapes of the outputs, of a model that the options make."""
    words = OPTIONS[name]
    config = parse_options(["--data", str(rows), f"--model={name}", *words], default_config(name))
    kind = model_kind(config, KINDS[name].learn(config, Console(quiet=True)))
    batch = kind.encoder.batch(table())

    def trace():
        model = kind.make(4, nnx.Rngs(0))
        loss, _ = kind.loss(model, batch)
        return loss, kind.predictions(model, batch.dense, batch.features)

    loss, outputs = nnx.eval_shape(trace)
    assert loss.shape == ()
    shapes = {name: x.shape for name, x in outputs.items()}
    assert shapes == {"probability": (ROWS,), "logit": (ROWS,)}


def test_rows_of_masknet_begin_with_norms_about_1(rows):
    words = ["--data", str(rows), "--model=masknet", *CLICKS, "history"]
    config = parse_options([*words, "--model.embedding-dim=256"], default_config("masknet"))
    kind = model_kind(config, KINDS["masknet"].learn(config, Console(quiet=True)))
    model = kind.make(4, nnx.Rngs(0))
    norms = np.linalg.norm(model.embeddings.table("item"), axis=1)
    np.testing.assert_allclose(norms, 1, atol=0.2)


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name not in ALIKE])
def test_results_of_a_run(runs, name):
    run = runs(name)
    results = json.loads((run / "results.json").read_text())
    assert np.isfinite([results[measure.name] for measure in kind_of(run).measures]).all()
    assert (results["model"], results["steps"], results["best_step"]) == (name, 4, None)
    assert results["rows"] > 0
    assert results["held_out_rows"] > 0
    assert results["seconds"] > 0


# A model of rows, one of several labels, and one for each other way to make batches.
@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcn_v2", "mmoe", "two_tower", "sasrec", "hstu_ranker"])
def test_stopped_and_resumed_is_as_never_stopped(runs, tmp_path, name):
    run, output = runs(name), tmp_path / "model"
    results = json.loads((run / "results.json").read_text())
    shutil.copytree(run, output)
    shutil.rmtree(output / "4")
    (output / "results.json").unlink()
    assert main(["train", f"--resume={output}"]) == 0
    assert (
        json.loads((output / "results.json").read_text())[kind_of(run).measures[0].name]
        == (results[kind_of(run).measures[0].name])
    )
    for one, other in zip(*(numbers(load_model(x), None) for x in (run, output)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["mmoe", "two_tower", "sasrec"])
def test_two_devices_and_one_agree(runs, rows, tmp_path, monkeypatch, name):
    """In evaluation as well. Dropout draws other masks on a mesh, so that it is off here."""
    monkeypatch.setitem(DEFAULTS, "dropout_rate", 0.0)

    def train(devices):
        options = [f"--data={rows}", f"--model={name}", "--epochs=2", *OPTIONS[name]]
        options += [f"--devices={devices}", f"--output={tmp_path / devices}"]
        assert main(["train", *options]) == 0
        return tmp_path / devices

    on_one = train("1") if name == "sasrec" else runs(name)
    one, two = (json.loads((run / "results.json").read_text()) for run in (on_one, train("2")))
    for measure in kind_of(on_one).measures:
        assert two[measure.name] == pytest.approx(one[measure.name], rel=1e-4), measure.name


@pytest.mark.slow
def test_several_labels_beside_numpy(runs):
    """A click and a number, in the number's units."""
    run = runs("mmoe")
    results = json.loads((run / "results.json").read_text())
    kind, held_out = kind_of(run), table()[64:]
    batch = kind.encoder.batch(held_out)
    predictions = kind.predictions(load_model(run), batch.dense, batch.features)
    p, click = np.asarray(predictions["click_probability"], np.float64), held_out["click"]
    click = click.to_numpy()
    log_loss = -np.where(click == 1, np.log(p), np.log(1 - p)).mean()
    assert results["click/log_loss"] == pytest.approx(log_loss, rel=1e-5)
    assert results["click/auc"] == pytest.approx(auc(p, click), abs=1e-6)
    stars, wanted = np.asarray(predictions["stars_prediction"]), held_out["stars"].to_numpy()
    errors = wanted - stars
    assert results["stars/rmse"] == pytest.approx((errors**2).mean() ** 0.5, rel=1e-5)
    assert results["stars/mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    r2 = 1 - (errors**2).sum() / ((wanted - wanted.mean()) ** 2).sum()
    assert results["stars/r2"] == pytest.approx(r2, abs=1e-4)
    scale = np.std(table()["stars"].to_numpy()[:64])
    loss = log_loss + (errors**2).mean() / scale**2
    assert results["loss"] == pytest.approx(loss, rel=1e-5)
    # The rows of the deciles are all held-out rows, in the units of the labels.
    groups = results["calibration_deciles"]
    for label, predicted, observed in (("click", p, click), ("stars", stars, wanted)):
        for name, values in (("predicted", predicted), ("observed", observed)):
            mean = sum(x["rows"] * x[name] for x in groups[label]) / len(held_out)
            assert mean == pytest.approx(np.asarray(values, float).mean(), rel=1e-5)
    # A shuffled column, beside the loss of the rows with that column in the same order.
    importance = results["importance"]
    names = [*kind.encoder.schema.dense, *kind.encoder.schema.categorical]
    assert (importance["value"], importance["rows"]) == ("loss", len(held_out))
    assert {*importance["columns"]} == {*names}
    order = np.random.default_rng([0, names.index("item")]).permutation(len(held_out))
    place = held_out.column_names.index("item")
    shuffled = held_out.set_column(place, "item", held_out["item"].take(pa.array(order)))
    again, _ = kind.loss(load_model(run), kind.encoder.batch(shuffled))
    assert importance["columns"]["item"]["loss"] == pytest.approx(float(again) - loss, abs=1e-5)


@pytest.mark.slow
def test_several_labels_are_exported_and_predicted(runs, rows, tmp_path):
    model, scores = tmp_path / "model", tmp_path / "scores.parquet"
    size = ["--batch-sizes", "16", "--platforms", "cpu"]
    assert main(["export", str(runs("mmoe")), str(model), *size]) == 0
    assert main(["predict", str(model), str(rows), "-o", str(scores), "--keep", "stars"]) == 0
    predicted = pq.read_table(scores)
    names = ["stars", "click_probability", "click_logit", "stars_prediction"]
    assert sorted(predicted.column_names) == sorted(names)
    kind = kind_of(runs("mmoe"))
    batch = kind.encoder.batch(table())
    expected = kind.predictions(load_model(runs("mmoe")), batch.dense, batch.features)
    for name in names[1:]:
        np.testing.assert_allclose(predicted[name].to_numpy(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_history_shares_the_table_of_its_item(runs):
    run = runs("din")
    encoder = TableEncoder.load(run / "features")
    assert encoder.schema.categorical["history"].table == "item"
    counts = encoder.vocabularies["item"]
    training = table()[:64]
    items = training["item"].to_pylist() + [
        x for row in training["history"].to_pylist() for x in row
    ]
    assert dict(zip(counts.values.to_pylist(), counts.counts.tolist(), strict=True)) == {
        item: items.count(item) for item in set(items) if items.count(item) > 1
    }
    (config,) = load_model(run).items.configs
    assert config.feature_names == ("item", "history")


def naive_ranks(queries, items, wanted):
    scores = queries.astype(np.float64) @ items.T.astype(np.float64)
    return np.array([1 + (s > s[w]).sum() if w >= 0 else len(s) + 1
                     for s, w in zip(scores, wanted, strict=True)])  # fmt: skip


@pytest.mark.slow
def test_two_towers_rank_all_items(runs):
    run = runs("two_tower")
    kind, model = kind_of(run), load_model(run)
    whole = table()
    encoded = kind.encoder.encode(whole)
    batch = kind.encoder.pack(encoded, len(whole))
    ids = np.asarray(encoded["item"])
    queries, vectors = (
        np.asarray(tower(batch.dense, batch.features)) for tower in (model.query, model.candidate)
    )
    # The features of an item are those of its first training row.
    known, first = np.unique(ids[:64], return_index=True)
    first, known = first[known > 0], known[known > 0]
    places = {item: place for place, item in enumerate(known.tolist())}
    clicks = whole["click"].to_numpy()
    asked = [row for row in range(64, ROWS) if clicks[row]]
    wanted = np.array([places.get(int(ids[row]), -1) for row in asked])
    # The items that a user clicked in training are not ranked again, others are.
    users, ranks = np.asarray(encoded["user"]), []
    for row, place in zip(asked, wanted, strict=True):
        is_own = (users[:64] == users[row]) & (users[row] > 0) & (clicks[:64] == 1)
        had = {*ids[:64][is_own]} - {ids[row]}
        kept = [n for n, item in enumerate(known) if item not in had]
        own = kept.index(place) if place >= 0 else -1
        rank = naive_ranks(queries[row][None], vectors[first[kept]], [own])[0]
        ranks.append(rank if place >= 0 else len(first) + 1)
    assert np.any(ranks != naive_ranks(queries[asked], vectors[first], wanted))
    ranks = np.array(ranks)
    expected = rank_values(ranks, np.ones(len(ranks)))
    results = json.loads((run / "results.json").read_text())
    assert {name: results[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    # Columns of the users' tower alone are shuffled.
    assert {*results["importance"]["columns"]} == {"user"}
    assert results["importance"]["value"] == "ndcg@10"


@pytest.mark.slow
def test_sequences_rank_all_items(runs):
    run = runs("sasrec")
    kind, model = kind_of(run), load_model(run)
    model.eval()
    _, held_out = kind.datasets(Shard())
    sequences = {}
    ordered = table().sort_by("when")
    for user, item in zip(ordered["user"].to_pylist(), ordered["item"].to_pylist(), strict=True):
        sequences.setdefault(user, []).append(item)
    assert len(held_out) == len([x for x in sequences.values() if len(x) > 1])
    vocabulary = kind.encoder.vocabularies["item"]
    rows = {value: 1 + place for place, value in enumerate(vocabulary.values.to_pylist())}
    items = np.asarray(model.items.table("item"))[1 : 1 + len(rows)]
    ranks = []
    for sequence in sequences.values():
        history = [rows.get(item, 0) for item in sequence[:-1]][-6:]
        batch = jaxrec.KeyedJaggedArray.from_lists(
            {"history": [history], "targets": [[]], "negatives": [[]]}
        )
        state = np.asarray(model(batch)["history"].values)[len(history) - 1]
        wanted = rows.get(sequence[-1], 0) - 1
        ranks += naive_ranks(state[None], items, [wanted]).tolist()
    expected = rank_values(np.array(ranks), np.ones(len(ranks)))
    found = kind.evaluate(HeldOutBatches(model, held_out, 4))
    assert found == pytest.approx(expected, abs=1e-6)
    assert found == {name: json.loads((run / "results.json").read_text())[name] for name in found}


def test_ranks_beside_numpy(monkeypatch):
    """In parts, the last of which is padded; an unknown item ranks last."""
    monkeypatch.setattr("jaxrec.train.models.ranking._SCORES", 40)
    rng = np.random.default_rng(0)
    queries, items = (rng.normal(size=(n, 3)).astype(np.float32) for n in (11, 10))
    wanted = np.r_[rng.integers(0, 10, 10), -1]
    ranks = full_ranks(queries, items, wanted)
    np.testing.assert_array_equal(ranks, naive_ranks(queries, items, wanted))
    assert full_ranks(queries[:1] * np.nan, items, wanted[:1]).tolist() == [10]
    # Each query leaves out other items, and still ranks the one that it wants.
    left_out = [rng.choice(10, size, replace=False) for size in range(11)]
    expected = [
        naive_ranks(query[None], np.where(np.isin(range(10), np.setdiff1d(own, item))[:, None],
                                          -1e3 * query, items), [item])[0]
        for query, own, item in zip(queries[:-1], left_out, wanted, strict=False)
    ]  # fmt: skip
    ranks = full_ranks(queries, items, wanted, left_out.__getitem__)
    np.testing.assert_array_equal(ranks, [*expected, 11])
    values = rank_values(np.array([1, 3, 20]), np.array([1.0, 2.0, 1.0]))
    assert values == pytest.approx(
        {"ndcg@10": (1 + 2 * 0.5) / 4, "recall@10": 0.75, "mrr": (1 + 2 / 3 + 0.05) / 4}
    )


@pytest.mark.every_case
def test_sequences_of_rows_and_of_lists(tmp_path):
    rows = pa.table({"u": ["b", "a", "b", "a", "c"], "i": [1, 2, 3, 4, 5], "t": [9, 7, 1, 7, 0]})
    pq.write_table(rows, tmp_path / "x.parquet")
    data = DataConfig(path=tmp_path / "x.parquet", user="u", item=("i",), time="t")
    sequences = read_sequences(data, data.path).items
    assert sequences.to_pylist() == [[3, 1], [2, 4], [5]]  # equal times keep the order of the file
    before, last = split_last(sequences)
    assert (before.to_pylist(), last.to_pylist()) == ([[3], [2]], [1, 4])
    pq.write_table(pa.table({"h": [[3, 1], None, [], [5]]}), tmp_path / "y.parquet")
    lists = DataConfig(path=tmp_path / "y.parquet", history=("h",))
    assert read_sequences(lists, lists.path).items.to_pylist() == [[3, 1], [], [5]]
    assert item_column(lists) == "h"
    with pytest.raises(ConfigError, match="a column of lists, such as --history items, or rows"):
        item_column(DataConfig(path=tmp_path, item=("i",)))
    for column, message in (
        ([None, 1, 2, 3, 4], "1 times are null; leave their rows out"),
        (["x"] * 5, "is of type string; --time names a column of times or of numbers"),
    ):
        pq.write_table(rows.set_column(2, "t", pa.array(column)), tmp_path / "z.parquet")
        with pytest.raises(DataError, match=message):
            read_sequences(data, tmp_path / "z.parquet")
    with pytest.raises(DataError, match="--history names a column of lists"):
        read_sequences(DataConfig(path=data.path, history=("i",)), data.path)


@pytest.mark.every_case
def test_sequences_of_one_item_are_too_short(tmp_path, capsys):
    one, three = tmp_path / "one.parquet", tmp_path / "three.parquet"
    pq.write_table(pa.table({"h": [[1], []]}), one)
    pq.write_table(pa.table({"h": [[1, 2, 3]]}), three)
    options = ["train", "--model=sasrec", "--history=h", f"--output={tmp_path / 'model'}"]
    assert main([*options, f"--data={one}"]) == 1
    assert "one.parquet: no sequence has two items to train on besides" in capsys.readouterr().err
    assert main([*options, f"--data={three}", f"--data.eval-path={one}"]) == 1
    assert "one.parquet: no sequence has two items, of which" in capsys.readouterr().err


@pytest.mark.slow
def test_masks_of_bert4rec(runs):
    kind = kind_of(runs("bert4rec"))
    rng, row = np.random.default_rng(0), np.arange(1, 11, dtype=np.int32)
    for _ in range(20):
        history, targets = kind.sample(row, rng)
        is_masked = history == kind.num_items
        assert is_masked.any()
        assert len(history) == 6
        whole = np.where(is_masked, targets, history)
        assert (np.diff(whole) == 1).all(), "a stretch of the sequence"
        assert (targets[~is_masked] == 0).all()
    assert kind.question(row).tolist() == [6, 7, 8, 9, 10, kind.num_items]


WRONG = {
    "two-labels": (["--label", "click", "buy"], "dcn_v2 predicts one label, and there are 2"),
    **{
        name: ([f"--model={name}", "--label=click"], f"model.name {name} reads columns of lists")
        for name in ("din", "transact", "longer", "onetrans")
    },
    **{
        f"{name}-domain": (
            [f"--model={name}", *label, "--model.domain=user"],
            f"model.name {name} reads no --model.domain; leave it out, or take --model pepnet",
        )
        for name, label in (
            ("dcn_v2", ["--label=click"]),
            ("two_tower", ["--label=click", "--item=item"]),
            ("sasrec", ["--history=history"]),
            ("hstu_ranker", []),
        )
    },
    "din-dense": (
        ["--model=din", "--label=click", "--history=history", "--item=price"],
        "column 'price' is not categorical",
    ),
    "din-plain": (
        ["--model=din", "--label=click", "--history=when", "--item=item"],
        "column 'when' of --history has no lists",
    ),
    "pepnet": (
        ["--model=pepnet", "--label=click", "--model.domain=price"],
        "column 'price' is not categorical; --user, --item and --model.domain name categorical",
    ),
    "towers": (["--model=two_tower", "--label=click"], "name their columns, the id first"),
    "towers-item": (["--model=two_tower", "--label=click", "--item=x"], "there is no feature 'x'"),
    "towers-user": (
        ["--model=two_tower", "--label=click", "--item=item", "--user=price"],
        "column 'price' is not categorical; the first column of --item and --user name categorical",
    ),
    "towers-number": (["--model=two_tower", "--label=stars", "--item=item"], "'stars' is a number"),
    "towers-all": (
        ["--model=two_tower", "--label=click", "--item", "item", "user", "history", "when", "buy"],
        "none is left for the tower of users",
    ),
    "sequences": (["--model=sasrec"], "such as --user user --item item --time timestamp"),
    "sequences-label": (
        ["--model=sasrec", "--history=history", "--label=click"],
        "leave data.label out",
    ),
    "sequences-size": (
        ["--model=sasrec", "--history=history", "--batch-size=0"],
        "data.batch-size of model.name sasrec does not follow from the rows; give a number above 0",
    ),
    "best-by": (
        ["--label=click", "--model=dcn_v2", "--checkpoint.best-by=rmse"],
        "best-by rmse is not a value of this model; its values are auc, normalized_entropy",
    ),
    "kind": (["--label=click", "--model=gru4rec"], "invalid choice 'gru4rec'"),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_a_model_cannot_take_is_one_sentence(rows, tmp_path, capsys, options, message):
    assert main(["train", f"--data={rows}", *options, f"--output={tmp_path / 'model'}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_models_that_are_not_exported_say_so(runs, tmp_path, capsys):
    for command in (["export", str(runs("sasrec")), str(tmp_path / "model")],
                    ["quantize", str(runs("sasrec"))]):  # fmt: skip
        assert main(command) == 1
        error = capsys.readouterr().err
        assert "model.name sasrec ranks items" in error
        assert error.count("\n") == 1


def test_a_number_is_predicted_by_any_model_of_rows(rows, tmp_path, capsys):
    """By a float label; a label of 0 and 1 stays a click unless --label-kind says otherwise."""
    options = [*SMALL, "--exclude", "when", "click", "buy", "history", "--model=dcn_v2"]
    output = tmp_path / "model"
    assert main(["train", f"--data={rows}", "--label=stars", *options, f"--output={output}"]) == 0
    assert "  RMSE         " in capsys.readouterr().out
    assert yaml.safe_load((output / "features/schema.yaml").read_text())["label"] == {
        "stars": {"kind": "number"}
    }
    moments = TableEncoder.load(output / "features").moments["stars"]
    assert moments.mean == pytest.approx(table()["stars"].to_numpy()[:64].mean())


@pytest.mark.slow
def test_dropout_is_off_in_evaluation(runs):
    """A sequence model has the same values each time."""
    kind, model = kind_of(runs("sasrec")), load_model(runs("sasrec"))
    _, held_out = kind.datasets(Shard())
    batches = HeldOutBatches(model, held_out, 4)
    assert kind.evaluate(batches) == kind.evaluate(batches)
    assert any(isinstance(x, nnx.Dropout) and x.rate > 0 for _, x in nnx.iter_graph(model))
