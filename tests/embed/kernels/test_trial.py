"""Trials of kernels on the card at hand: here the CPU stands for it."""

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
from jax.sharding import PartitionSpec

from jaxrec import optim
from jaxrec.embed import kernels
from jaxrec.embed.formats import FORMATS, TABLE_FORMATS, PackedRows
from jaxrec.embed.kernels import answers, mosaic, reference, registry, sparse_core, trial, triton
from jaxrec.embed.kernels.answers import Answers, Trials
from jaxrec.embed.kernels.trial import Form, compare
from jaxrec.embed.kernels.triton.readers import reader_of

COPY = Form("row_lookup", "float32", 16)
RULES = {
    "sgd": optim.sgd(0.01),
    "momentum_sgd": optim.momentum_sgd(0.01),
    "adagrad": optim.adagrad(0.01),
    "rowwise_adagrad": optim.rowwise_adagrad(0.01),
    "adam": optim.adam(0.01),
    "lamb": optim.lamb(0.01, clip_norm=1.0),
}
FORMS = [
    COPY,
    Form("row_lookup", "bfloat16", 100),
    Form("pooled_lookup", "float32", 64, "float32"),
    Form("pooled_lookup", "float16", 24, "bfloat16", weighted=True),
    Form("row_lookup", "int8", 16, row_format=FORMATS["int8"]),
    Form("row_lookup", "float8_e5m2", 3, row_format=TABLE_FORMATS["float8_e5m2"]),
    Form("pooled_lookup", "int2", 20, "bfloat16", row_format=FORMATS["int2"]),
    Form("pooled_lookup", "int8", 12, "float32", weighted=True, row_format=TABLE_FORMATS["int8"]),
    Form("flatten_bags"),
    Form("flatten_bags", weighted=True, averaged=True),
    Form("sum_rows", "float32", 16),
    Form("sum_rows", "bfloat16", 40, weighted=True, bounded=True),
    Form("fused_update", "bfloat16", 16, "bfloat16", True, RULES["rowwise_adagrad"]),
    *(Form("fused_update", "float32", 20, "float32", False, rule) for rule in RULES.values()),
]
ATTENTION = [
    Form("attention", "bfloat16", 32, value_dim=8, grouped=True),
    Form("attention_gradients", "float16", 16, value_dim=16),
]


def module(**functions) -> types.ModuleType:
    made = types.ModuleType("made_up")
    vars(made).update(functions)
    return made


class Card:
    """Stands for a GPU."""

    device_kind, platform = "Test card", "gpu"
    client = types.SimpleNamespace(platform_version="driver 1")


def _try(trials: Trials, form: Form) -> str | None:
    return compare(form, getattr(trials.kernels, form.primitive))


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """Makes trials of an implementation whose functions are given."""
    monkeypatch.setattr(Trials, "_try", _try)
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "cache"))

    def make(card: type = Card, **functions) -> Trials:
        return Trials("made_up", module(**functions), card())

    return make


def wrong(table, rows):
    return reference.row_lookup(table, rows) + 0.25


def broken(table, rows):
    raise NotImplementedError("no rule for\n  this operation")


def restless(table, rows, _calls=[]):  # noqa: B006
    _calls.append(None)
    return reference.row_lookup(table, rows) * (1 + 1e-6 * len(_calls))


def forgetful(table, state, *arguments, **options):
    return reference.fused_update(table, jax.tree.map(jnp.zeros_like, state), *arguments, **options)


def diligent(table, state, *arguments, **options):
    new, state = reference.fused_update(table, state, *arguments, **options)
    return new.at[7].multiply(0.99), state


@pytest.mark.jax_version
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_right_kernels_pass(gpu: types.ModuleType, form: Form):
    kernel = functools.partial(getattr(gpu, form.primitive), interpret=True)
    assert compare(form, kernel) is None


@pytest.mark.parametrize("form", ATTENTION, ids=str)
def test_attention_that_hides_a_key_from_a_query_fails(form: Form):
    """The kernels of Mosaic are held to the definition in `mosaic/hstu/test_kernels.py`."""
    kernel = getattr(reference, form.primitive)

    def hiding(*, ranges, **arguments):
        return kernel(ranges=ranges.at[0, 200].add(1), **arguments)

    assert Form.of(form.primitive, {**form.examples()[0][0]}) == form
    assert compare(form, kernel) is None
    assert "differ from the reference's" in str(compare(form, hiding))


@pytest.mark.parametrize("kernel", [forgetful, diligent], ids=lambda kernel: kernel.__name__)
def test_updates_that_lose_state_or_change_other_rows(kernel):
    form = Form("fused_update", "float32", 8, "float32", False, RULES["rowwise_adagrad"])
    assert compare(form, reference.fused_update) is None
    assert "differ from the reference's" in str(compare(form, kernel))


@pytest.mark.parametrize(
    ("form", "num_tiles"),
    [
        (Form("pooled_lookup", "float32", 64, "float32"), 2),
        (Form("pooled_lookup", "int8", 64, "float32", row_format=FORMATS["int8"]), 3),
    ],
    ids=str,
)
def test_lookups_are_tried_with_bags_of_every_tile(form: Form, num_tiles: int):
    tiles = set()
    for arrays, static in form.examples():
        layout = static["layout"]
        mean_length = layout.num_positions / layout.num_bags
        tiles.add(
            reader_of(jax.tree.map(jnp.asarray, arrays["table"]))[1].tile(mean_length, None, None)
        )
    assert len(tiles) == num_tiles
    assert len(COPY.examples()) == 1


def test_formats_of_one_name_have_forms_of_their_own():
    rows = jax.ShapeDtypeStruct((3,), "int32")
    forms = []
    for row_format in (FORMATS["int8"], TABLE_FORMATS["int8"]):
        stored = jax.ShapeDtypeStruct((7, row_format.width(4)), row_format.dtype)
        table = PackedRows(stored, row_format, 4)
        forms.append(Form.of("row_lookup", {"table": table, "rows": rows}))
    assert list(map(str, forms)) == [
        "row_lookup D4 IntegerRows(bits=8)",
        "row_lookup D4 TrainedInt8Rows()",
    ]
    assert all(form.is_lasting for form in forms)


def test_forms_of_other_formats_do_not_last():
    class Own(type(FORMATS["float8"])):
        """A format that a user wrote; its name may mean another one in the next process."""

    assert not Form("row_lookup", "float8", 4, row_format=Own()).is_lasting


@pytest.mark.jax_version
def test_each_primitive_of_the_kernels_is_tried():
    tried = {form.primitive for form in [*FORMS, *ATTENTION]}
    modules = triton, mosaic, sparse_core
    of_cards = {
        name for name in registry.PRIMITIVES if any(hasattr(module, name) for module in modules)
    }
    assert of_cards == tried


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (wrong, "results differ from the reference's, by up to 0.25"),
        (broken, "it fails: NotImplementedError: no rule for this operation"),
        (restless, "it gives other bits when it is run again"),
    ],
    ids=["wrong", "does_not_compile", "does_not_repeat"],
)
def test_a_failure_is_said_once_a_process(trials, kernel, reason):
    for _ in range(2):  # processes
        found = trials(row_lookup=kernel)
        with pytest.warns(RuntimeWarning, match=r"row_lookup D16 float32 on this Test card"):
            assert reason in found.failure(COPY)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert reason in found.failure(COPY)


def test_a_failure_is_not_kept(trials):
    with pytest.warns(RuntimeWarning, match="did not pass"):
        assert trials(row_lookup=broken).failure(COPY) is not None
    assert trials(row_lookup=reference.row_lookup).failure(COPY) is None


def test_warnings_are_no_failure(trials):
    def deprecated(table, rows):
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        return reference.row_lookup(table, rows)

    assert trials(row_lookup=deprecated).failure(COPY) is None


def test_a_success_is_kept(trials):
    assert trials(row_lookup=reference.row_lookup).failure(COPY) is None
    assert trials(row_lookup=broken).failure(COPY) is None


def test_another_card_is_tried_anew(trials):
    class Newer(Card):
        device_kind = "Newer card"

    assert trials(row_lookup=reference.row_lookup).failure(COPY) is None
    with pytest.warns(RuntimeWarning, match="Newer card"):
        assert trials(Newer, row_lookup=broken).failure(COPY) is not None


@pytest.mark.jax_version
def test_other_versions_are_tried_anew(monkeypatch):
    class Driver(Card):
        client = types.SimpleNamespace(platform_version="driver 2")

    paths = [Answers.read(Card()).path, Answers.read(Driver()).path]
    for owner, name, value in [
        (jax, "__version__", "0.0"),
        (answers.importlib.metadata, "version", lambda _: "0.0"),
        (answers, "_text_digest", lambda: "another text"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            paths.append(Answers.read(Card()).path)
    assert len(set(paths)) == 5
    assert Answers.read(Card()).path == paths[0]


# Python 3.12 and 3.13 warn of a version that is missing before they return None.
@pytest.mark.filterwarnings("ignore:Implicit None:DeprecationWarning")
@pytest.mark.parametrize("files", [{}, {"RECORD": ""}, {"METADATA": "Name: jaxrec\n"}], ids=str)
def test_forms_are_kept_where_metadata_of_the_package_are_missing(
    trials, monkeypatch, tmp_path, files
):
    folder = tmp_path / "path" / "jaxrec-9.9.dist-info"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    if not files:
        folder.rmdir()
    monkeypatch.setattr(sys, "path", [str(folder.parent)])
    assert answers.environment_of(Card())["jaxrec"] == "not installed"
    assert trials(row_lookup=reference.row_lookup).failure(COPY) is None
    assert trials(row_lookup=broken).failure(COPY) is None  # kept: it is not tried again


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"passed": 3}'],
    ids=["empty", "cut", "list", "bytes", "number"],
)
def test_a_damaged_file_is_written_anew(trials, content):
    found = trials(row_lookup=reference.row_lookup)
    path = Answers.read(Card()).path
    path.parent.mkdir()
    path.write_bytes(content)
    assert found.failure(COPY) is None
    assert json.loads(path.read_text())["passed"] == {"made_up": [str(COPY)]}


def test_a_directory_that_cannot_be_written(trials, tmp_path, monkeypatch):
    found = trials(row_lookup=reference.row_lookup)
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert found.failure(COPY) is None


def test_rates_are_no_part_of_a_form():
    def form(optimizer):
        table, lookups = jnp.ones((3, 4)), kernels.Lookups(jnp.zeros(2, int), None, None)
        arguments = {"table": table, "gradients": table, "lookups": lookups}
        return Form.of("fused_update", arguments | {"optimizer": optimizer})

    rate = optim.hyperparameter("rate", 0.5)
    rates = [0.1, rate, lambda step: 0.1 / (step + 1)]
    assert len({form(optim.adam(each, weight_decay=rate)) for each in rates}) == 1
    assert form(optim.adam(0.1)) != form(optim.adam(0.1, b1=0.5))
    assert form(optim.adam(0.1)).is_lasting


def test_optimizers_of_others_are_tried_by_each_process(trials):
    @dataclasses.dataclass(frozen=True)
    class Own(optim.sgd):
        pass

    found = trials(fused_update=reference.fused_update)
    for optimizer in (Own(0.01), optim.ema(optimizer=Own(0.01))):
        form = Form("fused_update", "float32", 4, "float32", False, optimizer)
        assert found.failure(form) is None
        assert not Answers.read(Card()).path.exists()


@pytest.fixture
def tried_here(monkeypatch, tmp_path):
    """An implementation for this platform that is wrong, tried before it runs by default."""

    kernels = module(row_lookup=wrong, refuse=lambda *_: None)
    monkeypatch.setitem(sys.modules, "jaxrec.embed.kernels.made_up", kernels)
    made_up = registry.Implementation("made_up", ("cpu",), is_tried=True)
    implementations = (made_up, registry.IMPLEMENTATIONS[-1])
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", implementations)
    monkeypatch.setattr(trial, "cards", lambda: jax.devices("cpu")[1:])
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    registry._trials.cache_clear()
    yield
    registry._trials.cache_clear()


@pytest.mark.usefixtures("tried_here")
@pytest.mark.parametrize("how", ["eagerly", "in_jit", "in_shard_map"])
def test_wrong_kernels_do_not_run(how):
    table, rows = jnp.arange(16.0).reshape(8, 2), jnp.arange(8, dtype=jnp.int32)
    lookup = kernels.row_lookup
    if how == "in_jit":
        lookup = jax.jit(lookup)
    if how == "in_shard_map":
        mesh = jax.sharding.Mesh(jax.devices(), ("x",))
        lookup = jax.shard_map(
            lookup, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("x")),
            out_specs=PartitionSpec("x"),
        )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="made_up kernel did not pass the trial"):
        np.testing.assert_array_equal(lookup(table, rows), table)
    choice = kernels.describe("row_lookup", table, rows)
    assert choice.chosen["cpu"] == "reference"
    assert "its results differ from the reference's" in choice.refused["made_up"]


@pytest.mark.usefixtures("tried_here")
def test_who_names_a_kernel_gets_it():
    table, rows = jnp.arange(16.0).reshape(8, 2), jnp.arange(8, dtype=jnp.int32)
    with kernels.use_kernels("made_up", "reference"):
        choice = kernels.describe("row_lookup", table, rows)
    assert choice.chosen["cpu"] == "made_up"


def test_without_a_card_nothing_is_tried():
    assert trial.cards() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAXREC_KERNELS", raising=False)
        choice = kernels.describe("row_lookup", jnp.ones((8, 2)), jnp.zeros(3, jnp.int32))
    assert choice.chosen["cuda"] == "reference"
    assert choice.refused["triton"] == "there is no NVIDIA GPU here to try it on"
