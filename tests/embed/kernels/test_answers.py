"""Answers of this machine: choices that `jaxrec tune` keeps are read, left out, and followed."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed import kernels
from jaxrec.embed.kernels import answers, reference, registry, triton
from jaxrec.embed.kernels.answers import SIZE_RATIO, Answers, TunedCall, kept_for
from jaxrec.embed.kernels.trial import Form, compare, size_of

TABLE, ROWS = jnp.arange(64.0).reshape(32, 2), jnp.arange(16, dtype=jnp.int32)
FORM = str(Form("row_lookup", "float32", 2))
CALL = TunedCall(FORM, 16, 16, "made_up", {"width": 3}, 1.0, "reference", 2.0)


def made_up_lookup(table, rows, *, width: int = 1, _widths=[]):  # noqa: B006
    """The reference, which notes the option it was given."""
    _widths.append(width)
    return reference.row_lookup(table, rows)


@pytest.fixture
def widths(monkeypatch, tmp_path):
    """The widths that an implementation for CPUs was given; it comes after the reference."""
    seen: list[int] = []
    module = types.ModuleType("made_up")
    module.refuse = lambda primitive, arguments: (
        "too many rows" if arguments["rows"].size > 60 else None
    )
    module.row_lookup = functools.partial(made_up_lookup, _widths=seen)
    module.OPTIONS = {"row_lookup": {"width": (2, 3)}}

    # All that a new implementation takes: a module, and a line in the registry.
    monkeypatch.setitem(sys.modules, "jaxrec.embed.kernels.made_up", module)
    made_up = registry.Implementation("made_up", ("cpu",))
    implementations = (registry.IMPLEMENTATIONS[-1], made_up)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", implementations)
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    for cache in (kept_for, registry._program):
        cache.cache_clear()
    yield seen
    for cache in (kept_for, registry._program):
        cache.cache_clear()


def empty() -> Answers:
    return Answers.read(jax.devices("cpu")[0])


def keep(*calls: TunedCall) -> Answers:
    kept = functools.reduce(Answers.with_call, calls, empty())
    assert kept.write()
    kept_for.cache_clear()
    return kept


def choice_for(num_rows: int = 16) -> kernels.Choice:
    return kernels.describe("row_lookup", TABLE, jax.ShapeDtypeStruct((num_rows,), jnp.int32))


def test_a_kept_choice_is_followed_and_named(widths):
    assert choice_for().chosen["cpu"] == "reference"
    keep(CALL)
    assert str(choice_for()).splitlines() == [
        "row_lookup:",
        "  made_up (width 3, by jaxrec tune) on cpu",
        "  reference on cuda, rocm, tpu",
    ]
    np.testing.assert_array_equal(kernels.row_lookup(TABLE, ROWS), TABLE[:16])
    np.testing.assert_array_equal(jax.jit(kernels.row_lookup)(TABLE, ROWS), TABLE[:16])
    assert set(widths) == {3}


def test_a_choice_of_the_usual_implementation_without_options(widths):
    keep(dataclasses.replace(CALL, implementation="reference", options={}))
    assert "  reference (by jaxrec tune) on cpu" in str(choice_for()).splitlines()
    np.testing.assert_array_equal(kernels.row_lookup(TABLE, ROWS), TABLE[:16])
    assert widths == []


def test_who_names_an_implementation_gets_it(widths, monkeypatch):
    keep(CALL)
    with kernels.use_kernels("reference"):
        assert choice_for().tuned == {}
        kernels.row_lookup(TABLE, ROWS)
    monkeypatch.setenv("JAXREC_KERNELS", "reference")
    assert choice_for().chosen["cpu"] == "reference"
    assert widths == []


@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize(
    "change",
    [
        {"implementation": "gone"},
        {"implementation": "triton"},
        {"options": {"width": 4}},
        {"options": {"height": 3}},
        {"form": str(Form("row_lookup", "bfloat16", 2))},
        {"form": str(Form("sum_rows", "float32", 2))},
    ],
    ids=str,
)
def test_a_choice_that_does_not_fit_is_not_followed(change):
    keep(dataclasses.replace(CALL, **change))
    assert choice_for().tuned == {}
    assert choice_for().chosen["cpu"] == "reference"


@pytest.mark.usefixtures("widths")
def test_a_choice_holds_for_calls_of_about_its_size():
    larger = dataclasses.replace(CALL, lookups=64, bags=64, options={"width": 2})
    kept = keep(CALL, larger)
    assert SIZE_RATIO == 4
    sizes = {16: CALL, 31: CALL, 33: larger, 60: larger, 4: CALL}
    for size, call in sizes.items():
        assert choice_for(size).tuned == {"cpu": call}
    assert choice_for(3).tuned == {}
    assert choice_for(61).tuned == {}  # which the implementation refuses
    again = dataclasses.replace(CALL, milliseconds=0.5)
    assert kept.with_call(again).calls == (larger, again)


@pytest.mark.usefixtures("widths")
def test_calls_in_parts_follow_no_choices():
    keep(CALL)
    assert kernels.describe("row_lookup", TABLE, ROWS, parts_out=1).tuned == {"cpu": CALL}
    assert kernels.describe("row_lookup", TABLE, ROWS, parts_out=2).tuned == {}


@pytest.mark.usefixtures("widths")
def test_processes_of_one_run_follow_no_choices(monkeypatch):
    keep(CALL)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert choice_for().tuned == {}


def damaged(content: object) -> bytes:
    kept = {"environment": empty().environment, "passed": {}, "calls": content}
    return json.dumps(kept).encode()


@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: b"", "JSONDecodeError"),
        (lambda: b'{"environment"', "JSONDecodeError"),
        (lambda: b"\xff\xfe", "UnicodeDecodeError"),
        (lambda: b"[]", "TypeError"),
        (lambda: b"{}", "KeyError"),
        (lambda: b"[" * 100_000, "RecursionError"),
        (lambda: damaged(3), "TypeError"),
        (lambda: damaged([3]), "a choice has other fields"),
        (lambda: damaged([{"form": FORM}]), "a choice has other fields"),
        (lambda: damaged([dataclasses.asdict(CALL) | {"lookups": "16"}]), "lookups of a choice is"),
        (lambda: damaged([dataclasses.asdict(CALL) | {"options": {"width": 0.5}}]), "options of a"),
        (lambda: b'{"environment": {"jax": "0.1"}, "calls": []}', "other versions"),
        (lambda: damaged([]).replace(b"{}", b"3"), "AttributeError"),
        (lambda: damaged([]).replace(b"{}", b'{"made_up": 3}'), "TypeError"),
    ],
    ids=["empty", "cut", "bytes", "list", "mapping", "deep", "number", "numbers", "few", "text",
         "fraction", "foreign", "passed", "forms"],
)  # fmt: skip
def test_a_file_of_no_use_is_left_out_with_a_warning(make, reason):
    path = empty().path
    path.write_bytes(make())
    with pytest.warns(RuntimeWarning, match=reason):
        assert choice_for().chosen["cpu"] == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice_for()  # says so once a process
    assert str(path) in empty().problem
    assert keep(CALL).problem is None
    assert choice_for().tuned == {"cpu": CALL}


@pytest.mark.usefixtures("widths")
def test_choices_and_trials_keep_each_other():
    chosen, form = empty(), Form("row_lookup", "float32", 2)
    assert empty().with_passed("made_up", form).write()
    assert chosen.with_call(CALL).write()  # which was read before
    assert empty().passed == {"made_up": (FORM,)}
    assert empty().with_passed("triton", form).write()
    assert empty().passed == {"made_up": (FORM,), "triton": (FORM,)}
    assert empty().calls == (CALL,)


@pytest.mark.usefixtures("widths")
def test_a_directory_in_the_place_of_the_file():
    empty().path.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="IsADirectoryError"):
        assert choice_for().chosen["cpu"] == "reference"
    assert not empty().with_call(CALL).write()


@pytest.mark.jax_version
@pytest.mark.usefixtures("widths")
@pytest.mark.parametrize("version", ["jax", "driver", "jaxrec", "processor"])
def test_choices_of_another_version_are_not_followed(monkeypatch, version):
    keep(CALL)
    match version:
        case "jax":
            monkeypatch.setattr(jax, "__version__", "99.0")
        case "driver":
            monkeypatch.setattr(answers, "_library_digest", lambda: "missing")
        case "jaxrec":
            monkeypatch.setattr(answers.importlib.metadata, "version", lambda name: "99.0")
        case "processor":
            monkeypatch.setattr(answers, "cores", lambda: 1000)
    kept_for.cache_clear()
    assert choice_for().tuned == {}
    assert empty().problem is None
    assert empty().of_other_versions() == (0 if version == "processor" else 1)


@pytest.mark.usefixtures("widths")
def test_files_that_are_none_count_for_nothing(tmp_path):
    for name, text in {"a": "{", "b": "[]", "c": '{"environment": 3}', "d": "{}"}.items():
        (tmp_path / f"answers-{name}.json").write_text(text)
    assert empty().of_other_versions() == 0


def test_sizes():
    layout = kernels.BagLayout((0,), (7,), (0,), (2,), (0,), (3,), (False,))
    assert size_of("pooled_lookup", {"layout": layout}) == (7, 2)
    assert size_of("row_lookup", {"rows": ROWS}) == (16, 16)
    arguments = {"lookups": kernels.Lookups(ROWS, None, None), "gradients": TABLE}
    assert size_of("fused_update", arguments) == (16, 32)


@pytest.mark.jax_version
@pytest.mark.parametrize("primitive", list(triton.OPTIONS))
@pytest.mark.parametrize("end", [0, -1], ids=["least", "most"])
def test_options_of_gpu_kernels_do_not_change_results(primitive, end):
    options = {name: values[end] for name, values in triton.OPTIONS[primitive].items()}
    rule = optim.rowwise_adagrad(0.01) if primitive == "fused_update" else None
    form = Form(primitive, "float32", 24, "" if "_rows" in primitive else "float32", optimizer=rule)
    kernel = functools.partial(getattr(triton, primitive), interpret=True, **options)
    assert compare(form, kernel) is None
