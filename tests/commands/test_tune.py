"""`jaxrec tune`, from the model file to the choices that are kept, followed and shown."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxrec.commands import main
from jaxrec.embed import kernels
from jaxrec.embed.kernels import answers, registry
from jaxrec.embed.kernels.answers import Answers, kept_for
from jaxrec.tune.search import Stopwatch, Timing
from tests.tune.fakes import FAKE, REFERENCE

pytestmark = pytest.mark.every_case

MODEL = """
batch_size: 12
optimizer: {name: sgd, learning_rate: 0.1}
tables:
  - {name: user, num_embeddings: 30, embedding_dim: 4, pooling: none, pooling_factors: 2}
  - {name: item, num_embeddings: 50, embedding_dim: 8, dtype: bfloat16, pooling: mean}
"""


@pytest.fixture
def model(tmp_path) -> pathlib.Path:
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path


@pytest.fixture
def foretold(monkeypatch, tmp_path):
    """Two implementations on CPUs, whose times are foretold: by default the reference runs."""
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", (REFERENCE, FAKE))
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    kept_for.cache_clear()

    def time(self, implementation, options):
        if implementation.name == "reference":
            return Timing("reference", options, 8.0)
        if self.call.primitive != "row_lookup":
            return Timing("fake", options, None, "its results differ")
        return Timing("fake", options, 4.0 / options.get("width", 1))

    monkeypatch.setattr(Stopwatch, "time", time)
    yield
    kept_for.cache_clear()


def run(capsys, *arguments):
    """Exit code, output and errors."""
    code = main(["tune", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def kept() -> Answers:
    return Answers.read(jax.devices("cpu")[0])


@pytest.mark.usefixtures("foretold")
def test_choices_are_made_kept_and_followed(capsys, model, tmp_path):
    code, text, errors = run(capsys, model, "--output", tmp_path / "times.json")
    assert code == 0
    assert "pooled_lookup of bfloat16 rows of 8: 12 lookups (item)" in text
    assert re.search(r"reference +│ +│ +8.000 │ default", text)
    assert re.search(r"fake +│ width 4 +│ +1.000 │ chosen", text)
    assert re.search(r"fake +│ +│ +│ its results differ", text)
    assert f"4 of 4 choices are made, kept in {kept().path}" in text
    assert "3/4 row_lookup of float32 rows of 4: 24 lookups (user)\n" in errors
    chosen = [(call.form.split()[0], call.implementation, call.options) for call in kept().calls]
    assert chosen == [
        ("pooled_lookup", "reference", {}),
        ("fused_update", "reference", {}),
        ("row_lookup", "fake", {"width": 4}),
        ("fused_update", "reference", {}),
    ]
    # This process follows the choices from now on, and so do others.
    rows = jax.ShapeDtypeStruct((20,), jnp.int32)
    choice = kernels.describe("row_lookup", jnp.ones((30, 4)), rows)
    assert choice.name("cpu") == "fake (width 4, by jaxrec tune)"
    results = json.loads((tmp_path / "times.json").read_text())
    assert results["environment"] == kept().environment
    (copies,) = (call for call in results["calls"] if call["primitive"] == "row_lookup")
    assert copies["tables"] == ["user"]
    timing = {"implementation": "fake", "options": {"width": 4}, "milliseconds": 1.0}
    assert copies["timings"][3] == timing | {"failure": None}
    assert copies["choice"]["default_milliseconds"] == 8.0


@pytest.mark.usefixtures("foretold")
def test_options_of_the_batch(capsys, model):
    batch = ("--batch-size", 64, "--devices", 2, "--ids-per-feature", 3, "--dtype", "bfloat16")
    code, text, _ = run(capsys, model, *batch, "--no-keep")
    assert code == 0
    assert "pooled_lookup of bfloat16 rows of 8: 96 lookups in 32 bags (item)" in text
    assert "sum_rows of rows of 4: 96 lookups (user)" in text
    assert text.endswith("7 of 7 choices are made, not kept\n")
    assert not kept().path.exists()


@pytest.mark.usefixtures("foretold")
def test_an_interrupt_keeps_the_choices_made_so_far(capsys, model, monkeypatch):
    time = Stopwatch.time

    def interrupted(self, implementation, options):
        if options == {"width": 4}:
            raise KeyboardInterrupt
        return time(self, implementation, options)

    monkeypatch.setattr(Stopwatch, "time", interrupted)
    code, text, errors = run(capsys, model)
    assert code == 130
    assert errors.endswith("jaxrec tune: interrupted\n")
    assert "2 of 4 choices are made, kept in" in text
    assert [call.form.split()[0] for call in kept().calls] == ["pooled_lookup", "fused_update"]


@pytest.mark.usefixtures("foretold")
def test_choices_are_made_anew_and_removed(capsys, model):
    for _ in range(2):
        assert run(capsys, model)[0] == 0
        assert len(kept().calls) == 4
    path = kept().path
    path.write_text("{")
    code, _, errors = run(capsys, model)
    assert code == 0
    assert f"{path} is left out: JSONDecodeError" in errors
    assert len(kept().calls) == 4
    assert run(capsys, "--forget")[:2] == (0, f"4 choices removed from {path}\n")
    assert not path.exists()
    assert run(capsys, "--forget")[0] == 0


@pytest.mark.usefixtures("foretold")
def test_doctor_shows_choices(capsys, model, monkeypatch):
    main(["doctor", "--dim", "4"])
    assert "tune" not in capsys.readouterr().out
    run(capsys, model)
    main(["doctor", "--dim", "4"])
    text = capsys.readouterr().out
    assert "Choices of jaxrec tune\n" in text
    assert (
        "  row_lookup D4 float32, 24 lookups in 24 bags: fake, width 4, 1 ms (reference: 8 ms)\n"
    ) in text
    assert "  row_lookup of float32 rows of 4: fake (width 4, by jaxrec tune)\n" in text
    monkeypatch.setattr(answers, "_library_digest", lambda: "another")
    main(["doctor", "--dim", "4"])
    text = capsys.readouterr().out
    assert "4 choices of jaxrec tune are not used, as they were made with other versions" in text
    kept().path.write_text("[]")
    main(["doctor", "--dim", "4"])
    assert f"{kept().path} is left out: TypeError" in capsys.readouterr().out


@pytest.mark.usefixtures("foretold")
def test_named_kernels_are_mentioned(capsys, model, monkeypatch):
    monkeypatch.setenv("JAXREC_KERNELS", "reference")
    assert "JAXREC_KERNELS=reference comes before the choices" in run(capsys, model)[2]


@pytest.mark.usefixtures("foretold")
def test_a_directory_that_cannot_be_written(capsys, model, monkeypatch):
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(model / "under_a_file"))
    code, _, errors = run(capsys, model)
    assert code == 1
    assert "cannot be written; name another directory by JAXREC_CACHE_DIR" in errors
    assert run(capsys, model, "--no-keep")[0] == 0


@pytest.mark.usefixtures("foretold")
def test_a_call_that_nothing_can_be_timed_on(capsys, model, monkeypatch):
    def broken(self, implementation, options):
        return Timing(implementation.name, options, None, "it fails: out of memory")

    monkeypatch.setattr(Stopwatch, "time", broken)
    code, text, _ = run(capsys, model)
    assert code == 0
    assert "it fails: out of memory" in text
    assert "0 of 4 choices are made" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give the YAML file of a model, or --forget"),
        (["m.yaml", "--forget"], 2, "--forget removes choices and takes no model"),
        (["m.yaml", "--batch-size", "0"], 2, "--batch-size must be above 0, got 0"),
        (["m.yaml", "--ids-per-feature", "-1"], 2, "--ids-per-feature must be above 0, got -1.0"),
        (["m.yaml", "--rows", "3"], 2, "unknown option --rows"),
        (["m.yaml"], 1, "m.yaml: No such file or directory"),
    ],
)
def test_wrong_options(capsys, arguments, code, message):
    assert main(["tune", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_model_without_a_batch_size(capsys, model):
    model.write_text(MODEL.replace("batch_size: 12", ""))
    assert run(capsys, model)[0] == 2
    assert run(capsys, model, "--batch-size", "many")[0] == 2


def test_other_accelerators_have_nothing_to_choose(capsys, model, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    code, _, errors = run(capsys, model)
    assert code == 1
    assert "there is one implementation for tpu" in errors


@pytest.mark.slow
def test_in_a_process_of_its_own(capsys, model, tmp_path, monkeypatch):
    """The real implementations and clock; which of them wins is not asserted."""
    model.write_text("".join(line for line in MODEL.splitlines(True) if "user" not in line))
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXREC_KERNELS", raising=False)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jaxrec", "tune", model, "--seconds", "0.001"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "2 of 2 choices are made, kept in" in done.stdout, done.stdout
    assert "differ" not in done.stdout
    assert "it fails" not in done.stdout
    # This process has the same processor and versions.
    kept_for.cache_clear()
    main(["doctor", "--dim", "4"])
    kept_for.cache_clear()
    text = capsys.readouterr().out
    assert len(re.findall(r", [\d.e+-]+ ms \((cpu|reference): ", text)) == 2, text
    assert "left out" not in text
