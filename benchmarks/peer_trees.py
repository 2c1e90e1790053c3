"""Trains LightGBM or CatBoost with their default options, for `benchmarks.defaults`.

Usage: PEER_PYTHON benchmarks/peer_trees.py lightgbm FOLDER [--seed 0]
FOLDER has train.parquet and test.parquet with the column "label". Columns of floats are numbers
with missing values as NaN; all others are categories, numbered by the training rows. One thread.
Prints one JSON line: AUC and log loss on the test rows, processor seconds of training and
prediction, and the version. Needs an environment with pyarrow and lightgbm, or with pandas and
catboost.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

LABEL = "label"


def read(folder):
    """Return the columns ``[rows, columns]`` and labels of both files, and which are codes."""
    training, test = (pq.read_table(folder / f"{name}.parquet") for name in ("train", "test"))
    columns = []
    categories = []
    for place, name in enumerate(name for name in training.column_names if name != LABEL):
        parts = [table[name].combine_chunks() for table in (training, test)]
        if not pa.types.is_floating(parts[0].type):
            categories.append(place)
            known = parts[0].unique().drop_null()
            parts = [pc.index_in(part, known).fill_null(-1) for part in parts]
        columns.append([part.to_numpy(zero_copy_only=False).astype(float) for part in parts])
    values = [np.stack([column[i] for column in columns], axis=1) for i in range(2)]
    labels = [table[LABEL].cast(pa.int8()).to_numpy().astype(float) for table in (training, test)]
    return values, labels, categories


def lightgbm(values, labels, categories, seed):
    import lightgbm

    # The options of `LGBMClassifier()`, whose class needs scikit-learn besides.
    options = {"objective": "binary", "seed": seed, "num_threads": 1, "verbosity": -1}
    rows = lightgbm.Dataset(values[0], labels[0], categorical_feature=categories)
    return lightgbm.train(options, rows).predict(values[1]), lightgbm.__version__


def catboost(values, labels, categories, seed):
    import catboost
    import pandas

    frames = [
        pandas.DataFrame(
            {
                place: column.astype(int) if place in categories else column
                for place, column in enumerate(part.T)
            }
        )
        for part in values
    ]
    model = catboost.CatBoostClassifier(
        random_seed=seed,
        thread_count=1,
        verbose=False,
        cat_features=categories,
        allow_writing_files=False,
    )
    model.fit(frames[0], labels[0])
    return model.predict_proba(frames[1])[:, 1], catboost.__version__


def auc(probabilities, labels):
    """Return the area under the ROC curve; equal probabilities count half."""
    _, places, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ones = labels.sum()
    return (ranks[labels == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones))


def log_loss(probabilities, labels):
    kept = np.clip(probabilities, 1e-15, 1 - 1e-15)
    return -np.where(labels == 1, np.log(kept), np.log1p(-kept)).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["lightgbm", "catboost"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    values, labels, categories = read(options.folder)
    start = time.process_time()
    train = {"lightgbm": lightgbm, "catboost": catboost}[options.library]
    probabilities, version = train(values, labels, categories, options.seed)
    line = {
        "model": options.library,
        "seed": options.seed,
        "auc": auc(probabilities, labels[1]),
        "log_loss": log_loss(probabilities, labels[1]),
        "processor_seconds": round(time.process_time() - start, 1),
        "version": version,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
