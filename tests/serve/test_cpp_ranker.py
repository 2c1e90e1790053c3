"""Rankers with cached histories in C++: the scores, counts and errors of Python, and no race."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

from jaxrec.serve import export_ranker, load_ranker
from jaxrec.serve.http.bodies import JsonDecoder, encode_json
from jaxrec.serve.http.limits import RequestError
from jaxrec.serve.http.ranker_predictor import RankerPredictor
from jaxrec.serve.ranker.caches import HistoryCaches
from tests.nn import rankers
from tests.serve import cpp
from tests.serve.artifact.edited import write_manifest
from tests.serve.models import dlrm
from tests.serve.rankers import HISTORY, request
from tests.serve.test_cpp import needs_compiler, needs_runtime, write

pytestmark = pytest.mark.slow  # builds cpp/

COUNTS = ("hits", "appends", "misses", "evictions")

# Options of the model and of its export. Few programs, since each run of C++ compiles all of them.
RANKERS = {
    "start": ({"count_from": "start"}, {"history_sizes": (4, 12), "append_sizes": (3,)}),
    "end": ({"num_layers": 1}, {"history_sizes": (12,)}),
}


class Python:
    """An exported ranker, and the answers of `jaxrec serve` to bodies in JSON."""

    def __init__(self, name: str, path: pathlib.Path):
        options, sizes = RANKERS[name]
        export_ranker(
            rankers.small(**options),
            path,
            candidate_sizes=(4,),
            max_candidates=20,
            platforms=("cpu",),
            **sizes,
        )
        self.path, self.served = path, load_ranker(path)
        self._predictor = RankerPredictor(self.served)
        self._decoder = JsonDecoder(self._predictor.columns, 1000)

    def drop_caches(self, cache_bytes: int = 1 << 20) -> None:
        self.served._caches = HistoryCaches(cache_bytes, self.served.variables)

    def answer(self, body: str) -> dict:
        """Return the response, which is the scores or the error of status 400."""
        try:
            (scores,) = self._predictor.predict([self._decoder.decode(body.encode())])
        except RequestError as error:
            scores = error
        if isinstance(scores, RequestError):
            assert scores.status == 400
            return {"error": scores.message}
        return json.loads(encode_json(scores.columns))


@pytest.fixture(scope="module")
def pythons(tmp_path_factory) -> dict[str, Python]:
    """The rankers of `RANKERS`, whose folders are not to be changed."""
    directory = tmp_path_factory.mktemp("cpp")
    return {name: Python(name, directory / name) for name in RANKERS}


@pytest.fixture
def python(pythons) -> Python:
    """The ranker whose caches grow, without caches."""
    pythons["start"].drop_caches()
    return pythons["start"]


def metrics_of(path: pathlib.Path) -> dict[str, int]:
    """Read a file of metrics, by the names of `CacheCounts`."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    values = {name: int(value) for name, value in map(str.split, lines)}
    counts = {name: values.pop(f"jaxrec_history_cache_{name}_total") for name in COUNTS}
    counts["caches"] = values.pop("jaxrec_history_caches")
    counts["bytes"] = values.pop("jaxrec_history_cache_bytes")
    assert not values
    return counts


def assert_equal(answers: list[dict], wanted: list[dict], tolerance: float = 1e-6) -> None:
    for number, (answer, scores) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.keys() == scores.keys(), (number, answer, scores)
        for name in scores:
            assert [len(row) for row in answer[name]] == [len(row) for row in scores[name]]
            np.testing.assert_allclose(
                np.concatenate(answer[name] or [[]]),
                np.concatenate(scores[name] or [[]]),
                rtol=tolerance,
                atol=tolerance,
                err_msg=f"request {number}, {name}",
            )


def stream(seed: int, length: int) -> list[str]:
    """Return requests whose users come back with equal, longer, shorter and changed histories."""
    rng, known, bodies = np.random.default_rng(seed), {}, []
    for number in range(length):
        size = int(rng.integers(0, 4))
        keys = rng.choice(["a", "b", "c", "d", None], size, replace=False).tolist()
        if number % 7 == 6:
            keys = rng.choice(6, size, replace=False).tolist()
        batch = rankers.lists(
            rng.integers(0, 13, size).tolist(), rng.integers(0, 12, size).tolist(), seed=number
        )
        for row, key in enumerate(keys):
            if key in known and rng.random() < 0.8:
                old, more = known[key], int(rng.integers(0, 5))
                for name in HISTORY[1:]:
                    batch[name][row] = [*old[name], *batch[name][row][:more]][:12]
                batch["user"][row] = old["user"]
                if rng.random() < 0.1 and batch["item"][row]:
                    batch["item"][row][0] = (batch["item"][row][0] + 1) % rankers.ITEMS
            known[key] = {name: list(batch[name][row]) for name in HISTORY}
        bodies.append(json.dumps(request(batch, keys)))
    return bodies


@needs_runtime
@pytest.mark.parametrize("name", RANKERS)
def test_scores_and_counts_are_those_of_python(name, pythons, tmp_path):
    python, cache_bytes = pythons[name], 9_000
    python.drop_caches(cache_bytes)
    # Some come twice: a history of "end" is encoded for the time of its candidates.
    bodies = [
        body for number, body in enumerate(stream(1, 60)) for _ in range(1 + (number % 5 == 0))
    ]
    options = ["--metrics", str(tmp_path / "metrics"), "--cache-mb", str(cache_bytes / (1 << 20))]
    answers = cpp.predict(python.path, bodies, *options)
    assert answers.code == 0, answers.error
    assert_equal(answers.lines, [python.answer(body) for body in bodies])
    counts, wanted = metrics_of(tmp_path / "metrics"), python.served.cache_counts
    assert {each: counts[each] for each in (*COUNTS, "caches")} == {
        each: getattr(wanted, each) for each in (*COUNTS, "caches")
    }
    # C++ writes a mark before keys of text, and integers in digits.
    assert wanted.bytes <= counts["bytes"] <= min(wanted.bytes + wanted.caches, cache_bytes)
    assert all(counts[each] > 0 for each in COUNTS if each != "appends" or name == "start")


def changed(**columns) -> str:
    body = request(rankers.lists([3, 2], [2, 1]), ["a", "b"]) | columns
    return json.dumps({name: column for name, column in body.items() if column != ...})


# Requests that both refuse with the same words.
BAD_ROWS = {
    "unknown item": changed(item=[[1, 2, 3], [4, 50]]),
    "negative time": changed(time=[[1, 2, -3], [4, 5]]),
    "events of other lengths": changed(action=[[1, 2, 3], [0]]),
    "candidates of other lengths": changed(c_time=[[1], [5]]),
    "too much context": changed(user=[[1, 2], [3]]),
    "too long history": json.dumps(request(rankers.lists([2, 1_300], [1, 1]), [1, 2])),
    "too many candidates": json.dumps(request(rankers.lists([2], [1_021]), ["a"])),
    "other rows": changed(cache_key=["a"]),
}
# Requests that both refuse, each in its own words.
BAD_BODIES = {
    "keys of two types": (
        changed(cache_key=["a", 2]),
        "column 'cache_key', sample 1: 2 is of another type than the values before it; give either",
    ),
    "a key of a fraction": (
        changed(cache_key=[1.5, 2]),
        "column 'cache_key', sample 0: expected text, an integer or null, got 1.5",
    ),
    "a key of a list": (
        changed(cache_key=[["a"], ["b"]]),
        "column 'cache_key', sample 0: expected text, an integer or null, got [\"a\"]",
    ),
    "one key": (changed(cache_key="a"), "column 'cache_key' must be a list with an element for"),
    "no keys": (changed(cache_key=...), "the request has no column 'cache_key'"),
    "no times": (changed(time=...), "the request has no column 'time'"),
    "null": (changed(time=[[1, None, 3], [1, 2]]), "feature 'time', sample 0: an id must be a"),
    "no list": (changed(item=[1, 2]), "feature 'item', sample 0: the ids must be a list, got 1"),
    "no body": ("", "the request cannot be read: it is not JSON"),
}


@needs_runtime
def test_bad_requests_are_those_of_python(python, tmp_path):
    """They leave no cache behind; keys of text and of integers differ."""
    bad = [*BAD_ROWS.values(), *(body for body, _ in BAD_BODIES.values())]
    batch = rankers.lists([3], [2])
    keys = [7, "7", 7.0, "7", None, 2**64 - 1]
    good = [json.dumps(request(batch, [key])) for key in keys]
    answers = cpp.predict(python.path, bad + good, "--metrics", str(tmp_path / "metrics"))
    assert answers.code == 1
    wanted = [python.answer(body) for body in bad]
    assert all(each.keys() == {"error"} for each in wanted)
    assert answers.lines[: len(BAD_ROWS)] == wanted[: len(BAD_ROWS)]
    for line, (_, message) in zip(
        answers.lines[len(BAD_ROWS) :], BAD_BODIES.values(), strict=False
    ):
        assert line["error"].startswith(message)
    assert_equal(answers.lines[len(bad) :], [python.answer(body) for body in good])
    counts = metrics_of(tmp_path / "metrics")
    assert (counts["hits"], counts["misses"], counts["caches"]) == (2, 4, 3)


@needs_runtime
def test_a_killed_program_starts_again(pythons, tmp_path):
    """Its caches are gone, and its scores are the same."""
    python, metrics = pythons["end"], tmp_path / "metrics"
    body = json.dumps(request(rankers.lists([5, 12], [3, 1]), ["a", "b"]))
    command = cpp.command(python.path, "--metrics", str(metrics))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=cpp.environment(), **pipes) as process:
        for _ in range(2):
            process.stdin.write(body + "\n")
            before = json.loads(process.stdout.readline())
        process.kill()
    assert_equal([before], [python.answer(body)])
    answers = cpp.predict(python.path, [body] * 2, "--metrics", str(metrics))
    assert answers.lines == [before] * 2
    counts = metrics_of(metrics)
    assert (counts["hits"], counts["misses"]) == (2, 2)


@needs_runtime
def test_threads_stay_within_the_bytes(pythons, tmp_path):
    """Few caches of many users, of whom some ask at the same time."""
    python, rng = pythons["end"], np.random.default_rng(0)
    python.drop_caches()
    batches = [rankers.lists([12], [9], seed=seed) for seed in range(4)]
    wanted = [python.answer(json.dumps(request(batch, ["x"]))) for batch in batches]
    bound = 5 * (python.served.cache_counts.bytes + 1)  # C++ writes a mark before the key
    which = rng.integers(0, 4, 400)
    users = [f"{rng.integers(0, 9)}" if each else "u" for each in which]
    bodies = [
        json.dumps(request(batches[each], [user])) for each, user in zip(which, users, strict=True)
    ]
    options = ["--threads", "4", "--metrics", str(tmp_path / "metrics")]
    answers = cpp.predict(python.path, bodies, *options, "--cache-mb", str(bound / (1 << 20)))
    assert answers.code == 0, answers.error
    assert_equal(answers.lines, [wanted[each] for each in which])
    counts = metrics_of(tmp_path / "metrics")
    assert (counts["caches"], counts["bytes"]) == (5, bound)
    assert counts["hits"] + counts["misses"] == len(bodies)
    assert min(counts["hits"], counts["evictions"]) > 0


@needs_runtime
def test_benchmark_and_options(pythons, tmp_path):
    path = pythons["end"].path
    options = ["--benchmark", "--batch", "1", "--seconds", "0.05", "--threads", "2"]
    answers = cpp.predict(path, [], *options, "--metrics", str(tmp_path / "metrics"))
    assert answers.code == 0, answers.error
    (line,) = answers.lines
    assert 0 < line["p50_us"] <= line["p99_us"]
    assert line["processor_us"] > 0
    assert metrics_of(tmp_path / "metrics")["hits"] > 0
    assert cpp.predict(path, [], "--cache-mb", "-1").code == 2
    missing = cpp.predict(path, [], "--metrics", str(tmp_path / "missing" / "metrics"))
    assert (missing.code, "No such file or directory" in missing.error) == (1, True)
    case = dlrm()
    other = write(tmp_path / "model", case.model, case.batch(20))
    refused = cpp.predict(other, [], "--metrics", str(tmp_path / "metrics"))
    assert (refused.code, "--metrics are those of a ranker's caches" in refused.error) == (1, True)


def edit(change):
    def edited(content: dict) -> None:
        change(content["ranker"])

    return edited


DAMAGES = {
    "unknown step": (
        edit(lambda ranker: ranker["programs"][0].update(step="train")),
        "a program of the ranker has the step 'train'",
    ),
    "missing program": (
        edit(lambda ranker: ranker["programs"].pop()),
        "its programs for cpu are not one for each step and size",
    ),
    "other platform": (
        edit(lambda ranker: [each.update(platform="cuda") for each in ranker["programs"]]),
        "has no programs for CPUs; export the ranker with platforms=('cpu',)",
    ),
    "sizes that do not ascend": (
        edit(lambda ranker: ranker["append_sizes"].append(3)),
        "its append sizes do not ascend from 1",
    ),
    "other context": (
        edit(lambda ranker: ranker.update(context=["item"])),
        "the first features of its history are not those of its context",
    ),
    "unknown time": (
        edit(lambda ranker: ranker.update(request_time="noon")),
        "it has no feature 'noon' of candidates",
    ),
    "other capacities": (
        lambda content: content["batch"]["sizes"][0]["capacities"][0].__setitem__(-1, 13),
        "its batch has other capacities than its largest history size",
    ),
    "other arrays": (
        edit(lambda ranker: ranker["caches"][0]["arrays"].pop(0)),
        "its caches of 12 events have other arrays than the smaller ones",
    ),
    "no numbers": (
        edit(lambda ranker: [each["arrays"].pop() for each in ranker["caches"]]),
        "its caches of 4 events do not end in three numbers",
    ),
    "another cache": (
        edit(lambda ranker: ranker["caches"][1]["arrays"][0]["shape"].__setitem__(0, 99)),
        "the program returns other outputs than the manifest lists",
    ),
    "other programs beside": (
        lambda content: content["programs"].append(
            {"samples": 1, **{
                name: content["ranker"]["programs"][0][name]
                for name in ("platform", "file", "targets", "stablehlo")
            }}
        ),
        "it has programs beside those of its ranker",
    ),
    "unknown file": (
        edit(lambda ranker: ranker["programs"][0].update(stablehlo="programs/none")),
        "it uses 'programs/none', which is not among its files",
    ),
    "undeclared kernels": (
        edit(lambda ranker: [each.update(targets=[]) for each in ranker["programs"]]),
        "which the manifest does not list; export the model again",
    ),
}  # fmt: skip


@needs_runtime
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_rankers_are_refused(name, pythons, tmp_path):
    change, message = DAMAGES[name]
    damaged = pathlib.Path(shutil.copytree(pythons["start"].path, tmp_path / "ranker"))
    write_manifest(damaged, change)
    answers = cpp.predict(damaged, [changed()])
    assert (answers.code, answers.lines) == (1, [])
    assert message in answers.error
    assert str(damaged) in answers.error


@needs_compiler
@pytest.mark.parametrize("sanitizer", cpp.SANITIZERS)
def test_caches_under_sanitizers(sanitizer):
    """Eviction, growth, errors and replaced models, by programs that the check has itself."""
    done = subprocess.run(
        [str(cpp.build_caches(sanitizer))], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "evictions" in done.stdout


@needs_compiler
def test_changed_manifests_and_requests_never_crash(python, tmp_path):
    (tmp_path / "requests").write_text("\n".join(stream(3, 8)) + "\n")
    arguments = [str(python.path), str(tmp_path / "requests"), "2000", "1"]
    done = subprocess.run([str(cpp.build_fuzz()), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("2000 runs")
