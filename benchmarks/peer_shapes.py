"""Options and batches of the scripts that time a peer on the shapes of `shapes.json`.

Imported as a neighbour by scripts that run in the peers' environment, without jaxrec.
"""

import argparse
import json
import pathlib

import numpy as np


def parse_options(seconds):
    """Return the options of the command line; ``seconds`` is the default time of a measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=pathlib.Path(__file__).with_name("shapes.json"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--only", help="name of the shape to time; all if not given")
    return parser.parse_args()


def chosen_shapes(options):
    """Return the shapes that are to be timed."""
    shapes = json.loads(pathlib.Path(options.shapes).read_text())["shapes"]
    return [shape for shape in shapes if options.only in (None, shape["name"])]


def draw_ids(shape):
    """Return the ids of a batch, int64 ``[tables, batch * bag]``."""
    rng = np.random.default_rng(0)
    count = shape["B"] * shape["L"]
    if shape["ids"] == "uniform":
        return rng.integers(0, shape["V"], (shape["T"], count))
    uniform = rng.random((shape["T"], count))
    if shape["ids"] == "powerlaw_1.05":
        return zipf_ids(uniform, shape["V"], 1.05)
    return np.minimum(shape["V"] ** uniform - 1, shape["V"] - 1).astype(np.int64)


def zipf_ids(uniform, rows, exponent):
    """Return ids with probabilities near ``(id + 1) ** -exponent``, of uniform numbers below 1.

    They are rounded down from the density ``x ** -exponent`` on ``[1, rows + 1)``, whose
    distribution function is inverted.
    """
    power = 1 - exponent
    drawn = (1 + uniform * ((rows + 1.0) ** power - 1)) ** (1 / power)
    return np.minimum(drawn - 1, rows - 1).astype(np.int64)
