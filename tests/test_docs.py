"""The Python code of README.md and of the pages of docs runs, and names in them exist.

Each section of a page runs by itself, after the blocks above the page's first section. A block that
begins with ```` ```python notest ```` is a fragment: it needs names that the page does not define.
The blocks of the pages in `PROGRAMS` are one program, and their commands run after it.
"""

from __future__ import annotations

import json
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = ("api", "results", "_build")  # folders that the build of the site writes
PAGES = {"README": (ROOT / "README.md").read_text()} | {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).parts[0] not in MADE
}
# Packages of extras that sections need.
NEEDS = {"clusters_and_streams: Kafka topics": "confluent_kafka"}
RUN_ELSEWHERE = ("data",)  # by tests/train/test_columns.py, which has the rows that it is about
PROGRAMS = ("from_parquet_to_server",)


def blocks(text: str) -> list[str]:
    """Return the fenced blocks of Python code that run."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def sections(text: str) -> dict[str, list[str]]:
    """Return the code of each section that has any, after that above the first section."""
    prelude, *rest = re.split(r"^##+ (.*)$", text, flags=re.MULTILINE)
    return {
        title: blocks(prelude) + blocks(body)
        for title, body in zip(rest[::2], rest[1::2], strict=True)
        if blocks(body)
    }


CODE = {
    f"{page}: {title}": code
    for page, text in PAGES.items()
    if page not in RUN_ELSEWHERE + PROGRAMS
    for title, code in sections(text).items()
}


def falls(names):
    return names["losses"][-1] < names["losses"][0]


def where_rows_lie(model):
    return model.embeddings.tables.get_value().rows["float32_4"].unsafe_buffer_pointer()


# What a section's names must hold in the end.
SHOWN = {
    "README: In your own model": falls,
    "recipes: Train in a loop": falls,
    "recipes: Copy a model before a donated step": lambda names: (
        where_rows_lie(names["before"]) != where_rows_lie(names["model"])
    ),
    "recipes: Follow a learning-rate schedule": lambda names: len(names["groups"]) == 1,
    "recipes: Set a learning rate between steps": lambda names: (
        names["optimizer"].hyperparameters() == {"rate": 0.25}
    ),
    "recipes: Scale, add and change gradients": lambda names: "row indices" in names["message"],
    "recipes: Accumulate gradients with `Trainer`": lambda names: "MultiSteps" in names["message"],
    "recipes: Handle a loss that is NaN or infinite": lambda names: names["counts"] == (1, 1),
    "recipes: Use `nnx.value_and_grad`, or a teacher": lambda names: (
        "jaxrec.value_and_grad" in names["message"]
    ),
    "serving: Export a program of your own": lambda names: (
        names["again"].tolist() == names["scores_of"](*names["arguments"]).tolist()
    ),
    "recipes: Save by hand with Orbax": lambda names: (
        len(names["shapes_and_places"](names["model"].over.kernel[...]).sharding.device_set) == 8
    ),
    "recipes: Find ids that are out of range": lambda names: "[0, 60)" in names["message"],
    "recipes: Predict one sample on a mesh": lambda names: names["logits"].shape == (1,),
    "recipes: Use `nnx.Embed` beside the tables": lambda names: names["rows_here"] == 512,
    "sharding: A dense part that is too large to replicate": lambda names: (
        names["lies"].addressable_shards[0].data.shape == (256, 128)
    ),
    "recipes: Find out which rows changed": lambda names: (
        sorted(names["published"]) == [7, 31, 59] and names["unsaved"].tolist() == [5, 12]
    ),
    "from_torchrec: Checkpoints, there and back": lambda names: (
        names["unused"] == [] and (names["model"].embeddings.table("t_user") == 1).all()
    ),
    "sequences: Train a ranker": falls,
    "sequences: Read requests from Parquet": lambda names: (
        falls(names) and names["same"] and names["source"].counts.candidates == 3
    ),
    "sequences: Read a log of events": lambda names: names["candidates"] > 800,
    "sequences: Train on one window of time, evaluate on the next": lambda names: (
        len(names["counts"]) == 3 and sum(names["counts"]) == 600
    ),
    "sequences: Train on long histories": lambda names: (
        names["kept"][0] in (24, 200) and names["loss"] > 0
    ),
    "sequences: Balance devices": lambda names: names["after"] < 1.1 < names["before"],
    "sequences: How it compares": lambda names: (
        names["order_blind"] < names["time_blind"] < names["best"]
        and names["listens"].batch_size == 128
    ),
    "sequences: Serve": lambda names: names["difference"] < 1e-5 and names["grown"].tolist() == [4],
    "clusters_and_streams: Kafka topics": lambda names: (names["steps"], names["lag"]) == (5, 0),
    "clusters_and_streams: Event time": lambda names: names["ends"] == [200, 400, 600],
    "clusters_and_streams: A folder that is written to": lambda names: (
        (names["first"], names["second"]) == (3, 1)
    ),
    "metrics: A metric of your own": lambda names: names["bias"].tolist() == [0.125],
    "training: Batches that are not full": lambda names: names["logits"][0] > 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("section", CODE)
def test_code_runs(section, tmp_path, monkeypatch, unchecked):
    if section in NEEDS:
        pytest.importorskip(NEEDS[section], reason=f"{section} needs {NEEDS[section]}")
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    names: dict = {"__name__": "page"}
    for block in CODE[section]:
        exec(compile(block, section, "exec"), names)
    assert SHOWN.get(section, bool)(names)


@pytest.mark.slow
def test_the_way_from_a_file_to_a_server(tmp_path, monkeypatch, unchecked):
    pytest.importorskip("uvicorn", reason="jaxrec serve needs the extra 'serve'")
    if shutil.which("curl") is None:
        pytest.skip("the page asks its server by curl")
    monkeypatch.chdir(tmp_path)
    text = PAGES["from_parquet_to_server"]
    names: dict = {"__name__": "page"}
    for block in blocks(text):
        exec(compile(block, "from_parquet_to_server", "exec"), names)
    assert (names["metadata"].step, names["trainer"].step) == (24, 56)
    assert names["results"]["click/window_auc"] > 0.75
    assert names["logits"].shape == (2,)
    _, *commands = re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    script = "set -e; trap 'kill $(jobs -p)' EXIT\n" + "".join(commands)
    env = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    answer = done.stdout.decode().splitlines()[-1]
    assert [len(scores) for scores in json.loads(answer).values()] == [2]


def test_all_that_is_shown_is_there():
    assert set(SHOWN) | set(NEEDS) <= set(CODE)


def test_links_between_files_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(DOCS / f"{page}.md" for page in PAGES if page != "README")]
    broken = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in pages
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text())
        if not (path.parent / link).exists() and not link.startswith("api/")
    ]
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    for name in sorted(set(re.findall(r"(?<![\w/.-])jaxrec(?:\.\w+)+", PAGES[page]))):
        pkgutil.resolve_name(name)
