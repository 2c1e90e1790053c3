"""The command ``jaxrec doctor``."""

from __future__ import annotations

import importlib.metadata
import pathlib
import types

import jax
import pytest

from jaxrec.commands import doctor, main
from jaxrec.embed.kernels import Choice, cpu, mosaic, registry, trial
from jaxrec.tier.ids import library

FAILED = Choice("row_lookup", {"cuda": "reference"}, {"triton": "on this H200 it fails: OOM"})


@pytest.fixture(autouse=True)
def no_names(monkeypatch):
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)


@pytest.mark.skipif(cpu.missing() is not None, reason="the native library was not built")
def test_a_machine_in_order(capsys):
    assert main(["doctor", "--dim", "64"]) == 0
    output = capsys.readouterr().out
    assert f"  jax {jax.__version__}\n" in output
    assert "JAX computes on cpu: 8 x cpu" in output
    assert f"The native library has {cpu.instruction_set()} code for this processor" in output
    assert "fused_update of bfloat16 rows of 64: cpu\n" in output
    assert "pooled_lookup of int8 rows of 64: cpu\n" in output
    assert "row_lookup of quantized int8 rows of 64: cpu\n" in output
    assert "triton" not in output
    assert "mosaic" not in output
    assert output.endswith("Nothing to mend.\n")


def test_a_package_that_is_not_installed(capsys, monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert main(["doctor", "--dtypes", "float32"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("jaxrec is not installed\n")
    assert "  jax " not in output
    assert "To mend\n  jaxrec runs from a folder and is not installed: pip install -e" in output


def test_a_missing_library(capsys, monkeypatch):
    monkeypatch.setattr(cpu, "_load", lambda: "the native library was not built")
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "pooled_lookup of float32 rows of 128: reference\n" in output
    assert "    not cpu: the native library was not built\n" in output
    assert "up to twenty times slower: the native library was not built.\n" in output


def test_a_missing_library_of_id_maps(monkeypatch):
    monkeypatch.setattr(library, "missing", lambda: "it was not built")
    assert any(
        each.endswith("fifty times slower: it was not built.") for each in doctor.problems([])
    )


def test_named_kernels_are_mentioned(monkeypatch):
    monkeypatch.setenv("JAXREC_KERNELS", "reference")
    assert any("JAXREC_KERNELS=reference keeps" in each for each in doctor.problems([]))


def test_a_card_that_jax_does_not_use(monkeypatch):
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert any("jaxrec[cuda12]" in each for each in doctor.problems([]))


def test_a_kernel_that_failed_its_trial(monkeypatch):
    monkeypatch.setattr(trial, "cards", jax.devices)
    monkeypatch.setattr(doctor, "OLDEST_JAX_ON_GPUS", jax.__version_info__)
    assert doctor.problems([FAILED]) == [
        "row_lookup runs without its triton kernel: on this H200 it fails: OOM."
    ]


def test_attention_has_kernels_for_some_cards_alone(monkeypatch):
    monkeypatch.setattr(trial, "cards", jax.devices)
    refused = {"triton": "it has no attention", "mosaic": "it is for Hopper cards"}
    other_card = Choice("attention", {"cuda": "reference"}, refused)
    assert doctor.describe("attention", other_card)[0] == "attention: tiles of XLA"
    assert doctor.failed_trials([other_card]) == []
    failed = Choice(
        "attention", {"cuda": "reference"}, {"mosaic": f"{registry.FAILED}H200 it fails"}
    )
    assert doctor.failed_trials([failed]) == [
        "attention runs without its mosaic kernel: on this H200 it fails."
    ]


def test_a_tpu_has_kernels_for_its_sparse_cores(monkeypatch):
    monkeypatch.setattr(doctor, "_platform", lambda: "tpu")
    refused = {"triton": "there is no NVIDIA GPU here", "sparse_core": "its rows are float32"}
    choice = Choice("row_lookup", {"tpu": "reference"}, refused)
    assert doctor.describe("row_lookup", choice) == [
        "row_lookup: reference",
        "  not sparse_core: its rows are float32",
    ]
    # XLA reads rows on SparseCores, too, so that only a failure is to be mended.
    before = doctor.problems([])
    assert doctor.problems([choice]) == before
    failed = Choice("row_lookup", {"tpu": "reference"}, {"sparse_core": "on this v6e it fails"})
    assert doctor.problems([failed]) == [
        *before,
        "row_lookup runs without its sparse_core kernel: on this v6e it fails.",
    ]


def test_both_backends_are_named_on_a_gpu(capsys, monkeypatch):
    def trials(implementation: registry.Implementation) -> types.SimpleNamespace:
        failure = "it fails: OOM" if implementation.name == "triton" else None
        card = types.SimpleNamespace(device_kind="H200")
        return types.SimpleNamespace(card=card, failure=lambda form: failure)

    monkeypatch.setattr(trial, "cards", jax.devices)
    monkeypatch.setattr(registry, "_trials", trials)
    monkeypatch.setattr(doctor, "OLDEST_JAX_ON_GPUS", jax.__version_info__)
    main(["doctor", "--dtypes", "float32"])
    output = capsys.readouterr().out
    assert "    not triton: on this H200 it fails: OOM\n" in output
    if mosaic_is_refused := mosaic.refuse("row_lookup", {}):
        assert "row_lookup of float32 rows of 128: reference\n" in output
        assert f"    not mosaic: {mosaic_is_refused}\n" in output
    else:
        assert "row_lookup of float32 rows of 128: mosaic\n" in output
        assert "without its triton kernel" not in output


def test_an_old_jax_on_a_gpu(monkeypatch):
    monkeypatch.setattr(trial, "cards", jax.devices)
    monkeypatch.setattr(doctor, "OLDEST_JAX_ON_GPUS", (99, 1, 0))
    (problem,) = doctor.problems([])
    assert problem.endswith("install JAX 99.1.0 or later, which needs Python 3.12.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dim", "0"], "--dim must be 1 or more, got 0"),
        (["--dtypes", "int3"], "--dtypes are float32, bfloat16, float16, int8, float8_e4m3"),
        (["--dims", "3"], "unknown option --dims, did you mean --dim"),
    ],
)
def test_wrong_options(capsys, options, message):
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err
