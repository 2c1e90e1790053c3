"""Raw columns in C++: the row indices of Python to the bit, and its errors."""

from __future__ import annotations

import json
import pathlib
import subprocess

import numpy as np
import pyarrow as pa
import pytest
from flax import nnx

import jaxrec
from jaxrec.data import DataError, Schema, learn_encoder
from jaxrec.data.encoder import bags_of
from jaxrec.data.vocabulary import FrozenVocabulary
from jaxrec.serve.artifact.export import refuse_columns
from jaxrec.serve.exported_run import with_vocabularies
from jaxrec.serve.http.bodies import JsonDecoder
from jaxrec.serve.http.predictor import Predictor, RequestError
from tests.serve import cpp
from tests.serve.artifact.edited import write_manifest
from tests.serve.models import dlrm
from tests.serve.test_cpp import needs_compiler, needs_runtime, write

pytestmark = pytest.mark.slow  # builds cpp/

WORDS = ["", "a", "Ulm", "Ägypten", "日本", "x" * 31, "x" * 32, "x" * 100, "\u0000", '"\\']
DENSE = {
    "age": {},
    "price": {"transform": "log1p", "missing": "zero"},
    "clicks": {"transform": "log_counts"},
    "plain": {"transform": "none", "missing": "error"},
    "flag": {},
    "vector": {"width": 3},
    "raw": {"width": 2, "transform": "none", "missing": "error"},
    "ts.age": {"part": "age", "transform": "log1p"},
    "ts.hour": {"part": "hour", "missing": "zero"},
    "ts.month": {"part": "month"},
    "seen.age": {"part": "age", "since": "ts", "transform": "none"},
    "views": {"transform": "log_standardize"},
    "debt": {"transform": "log_standardize", "missing": "zero"},
    "counts": {"width": 2, "transform": "log_standardize"},
    "seen.weekday": {"part": "weekday", "transform": "log_standardize"},
}
CATEGORICAL = {
    "word": {"num_unknown": 3},
    "code": {"min_count": 1},
    "tags": {"min_count": 1},
    "codes": {"min_count": 1, "num_unknown": 7},
    "strict": {"min_count": 1, "missing": "error"},
    "hashed": {"encoding": "hash", "num_embeddings": 1000},
    "hashes": {"encoding": "hash", "num_embeddings": 997},
    "modulo": {"encoding": "modulo", "num_embeddings": 50},
    "row": {"encoding": "ids", "num_embeddings": 20},
    "rows": {"encoding": "ids", "num_embeddings": 20},
    "open": {"encoding": "dynamic", "num_embeddings": 1},
    "opens": {"encoding": "dynamic", "num_embeddings": 1},
    "ts.weekday": {"part": "weekday"},
    "seen.hour": {"part": "hour", "min_count": 1},
    "seen.month": {"part": "month", "encoding": "hash", "num_embeddings": 99},
}


def raw_rows(rows: int, seed: int = 0) -> dict[str, list]:
    """Return raw columns with all encodings, with nulls where the schema takes them."""
    rng = np.random.default_rng(seed)

    def some(values, share=0.1):
        return [None if rng.random() < share else value for value in values]

    def bags(values):
        return [values[a : a + rng.integers(0, 4)] for a in rng.integers(0, len(values), rows)]

    words = [WORDS[i] for i in rng.integers(0, len(WORDS), rows)]
    wide = [int(x) for x in rng.integers(-(2**63), 2**63 - 1, 40)]
    small = rng.integers(0, 20, 40).tolist()
    return {
        "age": some((1e3 * rng.standard_normal(rows)).tolist()),
        "price": some((rng.standard_normal(rows) * 10.0 ** rng.integers(-9, 9, rows)).tolist()),
        "clicks": some(rng.integers(-9, 10_000, rows).tolist()),
        "plain": rng.standard_normal(rows).tolist(),
        "word": some(words),
        "code": some([wide[i] for i in rng.integers(0, 40, rows)]),
        "tags": some(bags(WORDS)),
        "codes": bags(wide),
        "strict": words,
        "hashed": some([f"{word}{i}" for i, word in enumerate(words)]),
        "hashes": bags([0, -1, 2**63 - 1, *wide]),
        "modulo": some(rng.integers(-(2**63), 2**63 - 1, rows).tolist()),
        "row": rng.integers(0, 20, rows).tolist(),
        "rows": some(bags(small)),
        "flag": some((rng.random(rows) < 0.5).tolist()),
        "open": some(words),
        "opens": some(bags([0, 2**63 - 1, *wide])),
        "vector": some(rng.standard_normal((rows, 3)).tolist()),
        "raw": rng.integers(-9, 9, (rows, 2)).tolist(),
        "ts": some(times(rows, rng)),
        "seen": some(times(rows, rng)),
        "views": some(np.exp(9 * rng.standard_normal(rows)).tolist()),
        "debt": some((rng.standard_normal(rows) * 10.0 ** rng.integers(-9, 300, rows)).tolist()),
        "counts": some(rng.integers(0, 10_000, (rows, 2)).tolist()),
    }


def times(rows: int, rng: np.random.Generator) -> list[str]:
    """Return moments of the years 1 to 9999 as text in all forms."""
    seconds = rng.integers(-62_135_500_000, 253_402_200_000, rows)
    seconds[::2] = rng.integers(1_700_000_000, 1_800_000_000, len(seconds[::2]))
    seconds[::5] = -1  # the last second of 1969
    forms = ("{}", "{}Z", "{}.25+05:30", "{}.123456789-0100", "{}+13", "{}.9")
    texts = seconds.astype("datetime64[s]").astype(str)
    texts = [forms[n % len(forms)].format(text) for n, text in enumerate(texts)]
    return [text[:10] if n % 7 == 0 else text.replace("T", " ") for n, text in enumerate(texts)]


class Mirror(nnx.Module):
    """Returns its dense features, and for each feature the sum of the row indices of a bag."""

    def __init__(self, rows: dict[str, int]):
        tables = [jaxrec.EmbeddingBagConfig(name, count, 1) for name, count in rows.items()]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
        for name, count in rows.items():
            self.embeddings.load_table(name, np.arange(count, dtype=np.float32)[:, None] + 1)

    def __call__(self, dense, features):
        return {"dense": dense, "rows": self.embeddings(features).values}


def encoder_of(dense: dict, categorical: dict, rows: int = 300) -> jaxrec.data.TableEncoder:
    columns = {"label": "label", "dense": dense, "categorical": categorical}
    schema = Schema.from_dict(columns)
    raw = raw_rows(rows)
    table = pa.table({"label": [0, 1] * (rows // 2), **raw})
    encoder = learn_encoder(schema, [table])
    encoded = encoder.encode(table)
    frozen = {}
    for name in schema.dynamic:
        ids, _ = bags_of(encoded[name].combine_chunks())
        frozen[name] = FrozenVocabulary(np.unique(ids))
    return with_vocabularies(encoder, frozen)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> pathlib.Path:
    """A model of all encodings; not to be changed."""
    encoder = encoder_of(DENSE, CATEGORICAL)
    path = tmp_path_factory.mktemp("columns") / "model"
    return write(path, Mirror(encoder.table_rows), None, encoder=encoder)


@needs_runtime
def test_rows_are_those_of_python_to_the_bit(exported):
    served = jaxrec.serve.load(exported)
    columns = Predictor(served).columns
    # The last rows have values that training did not see.
    batches = [raw_rows(samples, seed) for seed, samples in enumerate((1, 5, 30, 300, 200))]
    batches[-1]["word"] = [f"{word}?" for word in batches[-1]["word"]]
    batches[-1]["codes"] = batches[-1]["opens"] = [[number] for number in range(200)]
    batches[-1]["open"] = [f"{word}?" for word in batches[-1]["open"]]
    answers = cpp.predict(exported, [json.dumps(batch) for batch in batches])
    assert answers.code == 0, answers.error
    for batch, line in zip(batches, answers.lines, strict=True):
        expected = served.predict_columns(columns.table([batch]))
        np.testing.assert_array_equal(line["rows"], expected["rows"])
        dense = np.float32(line["dense"])
        exact = [0, 3, 4]  # of which no logarithm is taken
        np.testing.assert_array_equal(dense[:, exact], expected["dense"][:, exact])
        np.testing.assert_array_max_ulp(dense, expected["dense"], maxulp=4)


@needs_runtime
def test_columns_without_numbers(tmp_path):
    encoder = encoder_of({}, {"word": {}, "rows": CATEGORICAL["rows"]})
    path = write(tmp_path / "model", Mirror(encoder.table_rows), None, encoder=encoder)
    batch = {"rows": [[1, 2], None], "word": ["Ulm", "?"], "other": "ignored"}
    (line,) = cpp.predict(path, [json.dumps(batch)]).lines
    expected = jaxrec.serve.load(path).predict_columns({k: batch[k] for k in ("word", "rows")})
    assert line["rows"] == expected["rows"].tolist()


BAD_REQUESTS = {
    "a number for true": (
        {"flag": [True, 7.0]},
        "column 'flag', sample 1: expected true, false or null, got 7.0",
    ),
    "a reserved id": (
        {"opens": [[1], [3, -1]]},
        "the request, row 1 (from 0), column 'opens': id -1 (2**64 - 1 unsigned) is reserved",
    ),
    "a missing column": ({"age": ...}, "the request has no column 'age', which the model reads"),
    "no list": ({"age": 3}, "column 'age' must be a list with an element for each sample, got 3"),
    "text for a number": ({"age": [1, "a"]}, "column 'age', sample 1: expected a number or null"),
    "true for a number": ({"age": [1, True]}, "column 'age', sample 1: expected a number or null"),
    "null": (
        {"plain": [None, 1]},
        "the request, row 0 (from 0), column 'plain': the number is null; fill it, or give "
        "missing: zero in the schema",
    ),
    "a number that is too large": (
        {"plain": [1, 1e39]},
        "the request, row 1 (from 0), column 'plain': the number 1e+39 does not fit float32; take "
        "its log",
    ),
    "no count": (
        {"clicks": [1, 1e19]},
        "the request, row 1 (from 0), column 'clicks': the number 1e+19 is not a count of 64 bits",
    ),
    "a null word": (
        {"strict": ["a", None]},
        "the request, row 1 (from 0), column 'strict': the value is null; fill it, or give "
        "missing: unknown in the schema",
    ),
    "null in a list": (
        {"tags": [["a"], [None]]},
        "column 'tags', sample 1: expected text, got null",
    ),
    "an integer for a word": ({"word": ["a", 5]}, "column 'word', sample 1: expected text or null"),
    "a word for an integer": ({"code": [1, "a"]}, "column 'code', sample 1: expected an integer"),
    "no list of words": (
        {"tags": [["a"], "a"]},
        "column 'tags', sample 1: expected a list or null",
    ),
    "a list for a word": ({"word": [["a"], "a"]}, "column 'word', sample 0: expected text or null"),
    "a number with a fraction": (
        {"hashed": [1.5, 2]},
        "column 'hashed', sample 0: expected text or null, got 1.5",
    ),
    "a hashed word for an integer": (
        {"hashes": [[1, 2], ["a"]]},
        "column 'hashes', sample 1: expected an integer, got \"a\"",
    ),
    "a word for a raw id": (
        {"opens": [["7"], []]},
        "column 'opens', sample 0: expected an integer, got \"7\"",
    ),
    "an integer for a raw word": (
        {"open": ["a", 7]},
        "column 'open', sample 1: expected text or null, got 7",
    ),
    "an integer with a fraction": (
        {"row": [3.0, 3.5]},
        "column 'row', sample 1: expected an integer or null, got 3.5",
    ),
    "a float that leaves integers out": (
        {"codes": [[], [2.0**53 + 2]]},
        "column 'codes', sample 1: expected an integer, got 9",
    ),
    "more than 64 bits": (
        {"modulo": [1, 2**63]},
        f"column 'modulo', sample 1: {2**63} does not fit 64 bits",
    ),
    "no row": (
        {"rows": [[1], [3, 20]]},
        "the request, row 1 (from 0), column 'rows': id 20 is outside of its table of 20 rows; "
        "give a larger num_embeddings, or another encoding",
    ),
    "a negative row": (
        {"row": [-1, 0]},
        "the request, row 0 (from 0), column 'row': id -1 is outside of its table of 20 rows",
    ),
    "no time": (
        {"ts": ["2024-02-29", "2023-02-29"]},
        "the request, row 1 (from 0), column 'ts': \"2023-02-29\" is no time; write it as 2024-03",
    ),
    "a far time": (
        {"seen": [None, "0000-12-31"]},
        "the request, row 1 (from 0), column 'seen': the time is outside of the years 1 to 9999",
    ),
    "a number for a time": (
        {"ts": ["2024-02-29", 5]},
        "column 'ts', sample 1: expected text or nu",
    ),
    "a short vector": (
        {"vector": [None, [1, 2]]},
        "the request, row 1 (from 0), column 'vector': the vector has 2 numbers, and others have 3",
    ),
    "a large number of a vector": (
        {"vector": [[1, 2, 1e39], None]},
        "the request, row 0 (from 0), column 'vector': the vector has the number 1e+39, which floa",
    ),
    "a null vector": (
        {"raw": [[1, 2], None]},
        "the request, row 1 (from 0), column 'raw': the vector is null; fill it, or give missing: ",
    ),
    "text in a vector": ({"raw": [[1, 2], [1, "a"]]}, "column 'raw', sample 1: expected a number,"),
    "other numbers of samples": (
        {"word": ["a"]},
        "column 'word' has 1 samples, but column 'age' has 2; give one value or list for each",
    ),
}


def changed(change: dict) -> str:
    columns = {**raw_rows(2), **change}
    return json.dumps({name: value for name, value in columns.items() if value is not ...})


@needs_runtime
def test_bad_requests_are_answered_with_their_error(exported):
    lines = [changed(change) for change, _ in BAD_REQUESTS.values()]
    good = changed({})
    answers = cpp.predict(exported, [*lines, "[1]", "", good])
    assert answers.code == 1
    messages = [message for _, message in BAD_REQUESTS.values()]
    messages += ["a request must be an object of columns by name, got [1]", "the request cannot be"]
    for line, message in zip(answers.lines[:-1], messages, strict=True):
        assert line["error"].startswith(message)
    assert len(answers.lines[-1]["rows"]) == 2


def test_python_refuses_the_same_requests(exported):
    predictor = Predictor(jaxrec.serve.load(exported))
    decoder = JsonDecoder(predictor.columns, 100)
    for change, message in BAD_REQUESTS.values():
        try:
            (result,) = predictor.predict([decoder.decode(changed(change).encode())])
        except RequestError as error:
            result = error
        assert isinstance(result, RequestError)
        # Errors of values have the same words, those of types the decoder's.
        if "(from 0)" in message:
            assert result.message.startswith(message)


VALUES = (
    0, -1, 2, 19, 20, 1.5, 2.0, -0.0, 1e300, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, True, None,
    "", "Ulm", "ä", "\u0000", [], {}, [None], [1, "x"], [[1]], ["Ulm"], [-1], [1, None],
    [None, "a"], [1, 2.5], [1, 2, 3], [1, 2, 1e39], [1, 2, None], [0.1, 0.2, True],
    "2024-02-29", "2023-02-29", "1900-02-29", "2000-02-29T23:59:59.999999999Z", "2024-13-01",
    "2024-01-01T24:00", "2024-01-01 10:00+24", "2024-01-01T10:00:60", "0000-01-01", "0001-01-01",
    "9999-12-31T23:59:59-01", "2024-01-01T10", "2024-01-01T10:00:00.", "2024-01-01t10:00:00z",
    "2024-01-01T10:00+0160", "2024-01-01 10:00:00 Z", " 2024-01-01", "20240101",
    "2024-01-01T10:00Z",
)  # fmt: skip


@needs_runtime
def test_python_takes_the_same_values(exported):
    predictor = Predictor(jaxrec.serve.load(exported))
    decoder = JsonDecoder(predictor.columns, 100)
    good = raw_rows(2, 5)
    lines = [
        json.dumps(good | {name: [value, values[1]]})
        for name, values in good.items()
        for value in VALUES
    ]
    answers = cpp.predict(exported, lines).lines
    assert 0 < sum("error" in answer for answer in answers) < len(answers)
    for line, answer in zip(lines, answers, strict=True):
        try:
            (result,) = predictor.predict([decoder.decode(line.encode())])
        except RequestError as error:
            result = error
        assert isinstance(result, RequestError) == ("error" in answer), line
        if isinstance(result, RequestError):
            assert "(from 0)" not in result.message or result.message == answer["error"]
        else:
            np.testing.assert_array_equal(answer["rows"], result.columns["rows"])
            np.testing.assert_allclose(answer["dense"], result.columns["dense"], rtol=1e-6)


@needs_runtime
def test_models_of_earlier_versions_take_text_and_integers(exported, tmp_path):
    subprocess.run(["cp", "-r", str(exported), str(tmp_path / "model")], check=True)

    def forget_types(manifest: dict) -> None:
        for column in manifest["encoding"]["categorical"]:
            column.pop("is_text", None)

    write_manifest(tmp_path / "model", forget_types)
    changes = {"hashes": [["a"], [], None], "hashed": [1, 2.0, None], "open": [7, 8, 7]}
    columns = raw_rows(3) | changes
    mixture = columns | {"hashes": [[1, 2], ["a"], []]}
    requests = [json.dumps(columns), json.dumps(mixture)]
    taken, refused = cpp.predict(tmp_path / "model", requests).lines
    assert len(taken["rows"]) == 3
    assert refused["error"] == (
        "column 'hashes', sample 1: \"a\" is of another type than the values before it; give "
        "either text or integers"
    )


def test_counts_of_more_than_64_bits_are_refused(exported):
    served = jaxrec.serve.load(exported)
    with pytest.raises(DataError, match=r"row 1 .*'clicks': the number 1e\+19 is not a count"):
        served.predict_columns(pa.table(raw_rows(2) | {"clicks": [1.0, 1e19]}))


@needs_runtime
def test_encoded_requests_of_a_model_with_an_encoder(exported):
    served = jaxrec.serve.load(exported)
    assert served.encoder is not None
    batch = served.encoder.batch(Predictor(served).columns.table([raw_rows(5)]))
    columns = cpp.columns(batch.dense, batch.features)
    (line,) = cpp.predict(exported, [json.dumps(columns)], "--encoded").lines
    expected = served.predict(batch.dense, batch.features)
    np.testing.assert_array_equal(line["rows"], expected["rows"])


DAMAGES = {
    "unknown encoding": (
        lambda each: each["encoding"]["categorical"][0].update(encoding="bloom"),
        "'encoding' is 'bloom', which this version does not know",
    ),
    "no vocabulary": (
        lambda each: each["encoding"]["categorical"][0].update(vocabulary=None),
        "column 'word' has a vocabulary and another encoding, or the reverse",
    ),
    "another column": (
        lambda each: each["encoding"]["categorical"][0].update(name="other"),
        "has an encoding of other columns than its inputs are",
    ),
    "a file outside": (
        lambda each: each["encoding"].update(moments="/etc/passwd"),
        "it uses '/etc/passwd', which is not among its files",
    ),
    "another file": (
        lambda each: each["encoding"].update(moments="columns/0.hashes.npy"),
        "columns/0.hashes.npy cannot be used: it does not hold the moments of 4 columns",
    ),
    "swapped files": (
        lambda each: each["encoding"]["categorical"][0]["vocabulary"].update(
            hashes="columns/1.hashes.npy"
        ),
        "columns/1.hashes.npy cannot be used: it has ",
    ),
}


@needs_runtime
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_encodings_are_refused(name, exported, tmp_path):
    subprocess.run(["cp", "-r", str(exported), str(tmp_path / "model")], check=True)
    change, message = DAMAGES[name]
    write_manifest(tmp_path / "model", change)
    answers = cpp.predict(tmp_path / "model", [changed({})])
    assert (answers.code, answers.lines) == (1, [])
    assert message in answers.error


@needs_runtime
def test_encoders_of_earlier_versions(exported, tmp_path):
    subprocess.run(["cp", "-r", str(exported), str(tmp_path / "model")], check=True)
    write_manifest(tmp_path / "model", lambda each: each.pop("encoding"))
    assert jaxrec.serve.load(tmp_path / "model").encoder is not None
    (line,) = cpp.predict(tmp_path / "model", [changed({})]).lines
    assert "an earlier jaxrec exported the model; export it again" in line["error"]


@needs_runtime
def test_time_zones_are_refused(tmp_path):
    """By the error of each request; `jaxrec export` says so, too."""
    hour = {"part": "hour", "zone": "Europe/Berlin"}
    encoder = encoder_of({}, {"ts.hour": hour, "word": {}})
    path = write(tmp_path / "model", Mirror(encoder.table_rows), None, encoder=encoder)
    reason = "C++ encodes parts of times in UTC alone, not ts.hour (Europe/Berlin); serve the"
    assert refuse_columns(encoder.schema).startswith(reason)
    assert refuse_columns(Schema.from_dict({"label": [], "categorical": ["word"]})) is None
    batch = {"ts": ["2024-07-01T22:30:00Z"], "word": ["Ulm"]}
    assert jaxrec.serve.load(path).encoder.encode(pa.table(batch))["ts.hour"].to_pylist() != [0]
    (line,) = cpp.predict(path, [json.dumps(batch)]).lines
    assert f"has no encoding of columns for C++: {reason}" in line["error"]


@needs_compiler
def test_changed_columns_and_vocabularies_never_crash(exported, tmp_path):
    lines = [json.dumps(raw_rows(samples, samples)) for samples in (1, 3, 9)]
    (tmp_path / "requests").write_text("\n".join(lines) + "\n")
    arguments = [str(exported), str(tmp_path / "requests"), "2000", "1"]
    done = subprocess.run([str(cpp.build_fuzz()), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("2000 runs")


@needs_compiler
def test_threads_of_a_batcher_do_not_race():
    done = subprocess.run([str(cpp.build_threads())], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_models_without_an_encoder_have_no_columns(tmp_path):
    case = dlrm()
    path = write(tmp_path / "model", case.model, case.batch(20))
    assert jaxrec.serve.load(path).manifest.encoding is None
    assert not (path / "columns").exists()
