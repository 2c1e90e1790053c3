"""The scripts that check and time kernels on GPUs, where there is none."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
# The benchmarks are no installed package. Behind the installed jaxrec, which stays what is tested.
sys.path.append(str(ROOT))

from benchmarks.gpu import doc_tables, limits, matrix_code, report, step_shapes  # noqa: E402
from benchmarks.gpu.launches import Launches  # noqa: E402
from benchmarks.gpu.launches import parse as parse_thunks  # noqa: E402
from benchmarks.gpu.machine_code import Kernel, parse  # noqa: E402
from benchmarks.peer_shapes import zipf_ids  # noqa: E402

CARD = {"kind": "card", "card": "NVIDIA H200", "jax": "0.11.2", "copy_bytes_per_s": 4e12}
# Losses, parameters and GFLOP of small steps, as TorchRec 1.8.0 and torch 2.13 print them:
# PEER_PYTHON -m benchmarks.gpu.peer_dlrm --losses --precision float32
PEER_STEPS = {
    "dlrm_kaggle_8192": ((0.6848323, 0.7491882, 0.6674868), 475_985, 0.015179776),
    "dlrm_dcnv2_8192": ((0.6923967, 0.6947305, 0.6948068), 16_044_545, 0.512974848),
    "sasrec_512x200": ((2.7963452, 2.7674756, 2.7507474), 63_360, 0.0802816),
}


def written(tmp_path, *lines):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def rows_of(page, *cells):
    """Return the cells of the rows of a page that begin with some cells."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    return [row[len(cells) :] for row in rows if row[: len(cells)] == list(cells)]


def step(implementation, ms, device_ms, **others):
    times = {"ms": [ms, ms + 1], "device_ms": device_ms, "host_ms": 0.5, "launches": 40}
    line = {"kind": "step", "shape": "dlrm", "implementation": implementation, "precision": "tf32"}
    return line | times | {"peak_gb": 3.0, "table_gb": 2.0} | others


def test_pages_compare_steps_with_the_fastest_of_the_peers(tmp_path):
    lines = report.read(
        written(
            tmp_path,
            CARD,
            step("jaxrec", 9.0, 8.0),  # of a run before
            step("jaxrec", 2.0, 1.0),
            step("torchrec", 5.0, 2.0),
            step("torchrec compiled", 4.0, 2.5),
            step("torchrec", 0.1, 0.1, precision="float32"),
        )
    )
    page = report.page(CARD, lines)
    (row,) = rows_of(page, "dlrm", "jaxrec")
    assert row == ["2.000", "0.50", "1.000", "0.50", "0.500", "40", "3.00", "2.00"]
    assert rows_of(page, "dlrm", "torchrec compiled")[0][:2] == ["4.000", ""]


def test_pages_have_tables_beyond_memory(tmp_path):
    tier = {"kind": "tier", "implementation": "jaxrec", "shape": "cached_0.1"}
    times = {"ms": [9.5, 9.5], "hits": 0.9, "moved_mb": 3.5, "card": "NVIDIA H100"}
    lines = report.read(
        written(
            tmp_path,
            tier | {"primitive": "check adam", "passed": False},
            tier | {"primitive": "step adam", "published_ms": {"fbgemm": [7.9, 16.1, 8]}} | times,
            tier | {"primitive": "forward adam", "exception": "ValueError: no | room"},
        )
    )
    card = report.card_of(lines)
    assert card["card"] == "NVIDIA H100"
    page = report.page(card, lines)
    assert rows_of(page, "cached_0.1") == [
        ["check adam", "**failed**", "", "", "", ""],
        ["step adam", "9.500", "0.9", "3.5", "7.9 / 16.1 / 8", ""],
        ["forward adam", "ValueError: no / room", "", "", "", ""],
    ]


def test_pages_are_made_of_runs_that_were_cut(tmp_path):
    time = {"kind": "time", "implementation": "triton", "shape": "a", "primitive": "pooled_lookup"}
    time |= {"ms": [1.0, 1.0], "device_ms": 0.5, "bytes": [1e9, 2e9]}
    peer = time | {"implementation": "fbgemm", "device_ms": [1.0, 1.1]}
    failed = time | {"shape": "b", "exception": "ValueError: no | room"}
    left_out = [
        {"kind": "left out", "implementation": "triton", "shape": shape} for shape in ("a", "c")
    ]
    path = written(tmp_path, *left_out, CARD, time, peer, failed)
    path.write_text(path.read_text() + '{"kind": "time", "impl')
    page = report.page(CARD, report.read(path))
    (row,) = rows_of(page, "a", "pooled_lookup", "triton")
    # 1 GB at 4 TB/s takes 0.25 ms, half of the kernels' time.
    assert row == ["0.500", "0.50", "1.000", "1.00", "50% to 100%"]
    assert "ValueError: no \\| room" in page
    assert "Left out, for want of time: triton c." in page


def test_pages_have_the_rates_of_attention(tmp_path):
    line = {"kind": "attention", "implementation": "mosaic", "primitive": "both", "ms": [2.0, 3.0]}
    line |= {"shape": "attention 32 x 1024", "device_ms": 1.5, "launches": 9, "tflop_per_s": 321.4}
    failed = line | {"primitive": "forward", "exception": "ValueError: no"}
    page = report.page(CARD, report.read(written(tmp_path, CARD, line, failed)))
    assert rows_of(page, "32 x 1024", "both") == [["mosaic", "2.000", "1.500", "9", "321"]]
    assert rows_of(page, "32 x 1024", "forward")[0][:2] == ["mosaic", "ValueError: no"]


def kernel(code, **others):
    fields = {"registers": 40, "spilled": 0, "shared_memory": 0, "warps": 4}
    return Kernel("pool", instructions=parse(code), **(fields | others))


GATHER = """
.L_x_0:
LDG.E.128 R4, [R2];
FADD R8, R4, R8;
FADD R9, R5, R9;
BRA `(.L_x_0);
STG [R2], R8;
"""
CHAIN = """
.L_x_0:
LDG.E R2, [R3];
LDG.E R3, [R2];
LDG.E R4, [R3];
LDG.E R3, [R4];
BRA `(.L_x_0);
"""


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("code", "others", "resident", "reason"),
    [
        (GATHER, {}, 64, None),
        (GATHER, {"spilled": 8}, 64, "spills 8 bytes a thread"),
        (GATHER, {}, 16, "has 8 KB under way, below 24"),
        (CHAIN, {}, 64, "has 4 round trips in a turn of a loop, over 3"),
        (GATHER + "\nRED.E.ADD.F32 [R2], R4;", {}, 64, "adds floats by RED.E.ADD.F32"),
    ],
    ids=["good", "spill", "few bytes", "chain of loads", "atomic"],
)
def test_limits_name_what_exceeds_them(code, others, resident, reason):
    program = "triton pooled_lookup D128 float32 L20"
    failures = list(limits.failures(kernel(code, **others), program, "NVIDIA H200", resident))
    if reason is None:
        assert failures == []
    else:
        assert sum(reason in failure for failure in failures) == 1


def test_steps_may_take_any_number_of_launches():
    assert limits.most_launches("step mosaic dlrm_kaggle_8192") is None
    assert limits.most_launches("reference pooled_lookup D64 float32 L20") is None
    assert limits.most_launches("mosaic fused_update adagrad_clip_norm weighted") is None
    assert limits.most_launches("mosaic fused_update sgd D64 float32 L20") == 6


THUNKS = """\
001: kCustomKernel [source       | next=003 (2)] loop_select_fusion grid: [1280, 1, 1] threads: 128
002: kCopy         [source       | next=003 (1)] kCopy
003: kCustomKernel [prev=002 (1) | next=004 (1)] sort_11_0 grid: [40, 1, 1] threads: [1024, 1, 1]
004: kCustomKernel [prev=003 (1) | next=005 (1)] sort_11_0__1 grid: [256, 2, 1] threads: [128, 1, 1]
005: kCustomCall   [prev=004 (1) | next=006 (1)] kCustomCall
006: kGemm         [prev=005 (1) | sink        ] kGemm
"""


def test_launches_are_counted_by_kind():
    every = parse_thunks(THUNKS)
    joined = "000: kCommandBuffer [source | next=006 (1)] \n"
    joined += "".join(f"    {line}\n" for line in THUNKS.splitlines()[:4])
    joined += "\n".join(THUNKS.splitlines()[4:])
    alone = Launches.of_thunks(every, every)
    assert alone == Launches(
        kernels=2, sorts=1, libraries=1, copies=1, loops=0, starts=5,
        blocks={"loop_select_fusion": 1280, "sort_11_0": 40, "sort_11_0__1": 512},
    )  # fmt: skip
    assert alone.total == 5
    # The buffer, the custom call and the matrix product.
    assert Launches.of_thunks(every, parse_thunks(joined)).starts == 3


def test_tables_of_the_docs_are_those_of_the_results():
    text = "".join(page.read_text() for page in doc_tables.PAGES)
    assert doc_tables.filled(text) == text, "run python -m benchmarks.gpu.doc_tables"
    names = set(re.findall("<!-- table: (.+) -->", text))
    assert names == doc_tables.TABLES.keys()


def test_ids_of_rows_follow_their_power_law():
    rows, draws = 50, 200_000
    ids = zipf_ids(np.random.default_rng(0).random(draws), rows, 1.05)
    assert (ids.min(), ids.max()) == (0, rows - 1)
    # Of the density x ** -1.05 between id + 1 and id + 2.
    edges = np.arange(1, rows + 2, dtype=float) ** -0.05
    expected = np.diff(edges) / (edges[-1] - edges[0])
    found = np.bincount(ids, minlength=rows) / draws
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.17 / draws))


@pytest.mark.parametrize("name", step_shapes.STEPS)
def test_models_are_cut_to_the_memory_of_their_tables(name):
    whole = step_shapes.STEPS[name]
    cut = whole.cut(1_000_000_000)
    assert 0.95e9 * (whole.table_bytes > 1e9) < cut.table_bytes <= 1e9
    assert whole.cut(10**12) == whole


ATTENTION = """
UTMALDG.2D [UR4], [UR6];
.L_x_0:
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0;
WARPGROUP.DEPBAR.LE gsb0, 0x0;
MUFU.TANH R5, R6;
BRA `(.L_x_1);
FSEL R5, R5, RZ, P1;
FSEL R6, R6, RZ, P1;
.L_x_1:
BRA `(.L_x_0);
EXIT;
.L_x_2:
BRA `(.L_x_0);
"""


def test_loops_of_matrix_products():
    (loop,) = matrix_code.loops_of(kernel(ATTENTION))
    assert loop == matrix_code.Loop(1, 64.0, 8.0, whole=4, masked=6, waits=1)
    assert loop.share == 1.0
    assert list(matrix_code.failures(kernel(ATTENTION), "p")) == []


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("UTMALDG.2D [UR4], [UR6];", "NOP;", "loads nothing by the copy engine"),
        ("HGMMA", "HMMA", "no loop with products of warpgroups"),
        ("MUFU.TANH R5, R6;", "LDL R5, [R1];", "moves registers to memory 1 times"),
        ("MUFU.TANH R5, R6;", "UTMALDG.2D [UR4], [UR6];", "starts copies in the loop"),
        ("MUFU.TANH R5, R6;", "WARPGROUP.DEPBAR.LE gsb0, 0x0;", "waits 2 times for 1 groups"),
    ],
)
def test_kernels_of_attention_that_break_a_rule(old, new, reason):
    (failure,) = matrix_code.failures(kernel(ATTENTION.replace(old, new)), "p")
    assert reason in failure


@pytest.mark.every_case
@pytest.mark.parametrize("name", step_shapes.STEPS)
def test_batches_have_ids_of_their_tables(name):
    small = step_shapes.STEPS[name].small()
    if isinstance(small, step_shapes.ClickStep):
        ids = small.draw(0)[1]
        sizes = small.batch * np.array(small.bags)
        bounds = np.repeat(small.rows, sizes)
        assert ids.shape == bounds.shape
    else:
        ids = np.concatenate(small.draw(0))
        bounds = small.items
        assert ids.size == 2 * small.batch * small.length + small.negatives
    assert ids.min() == 0
    assert (ids < bounds).all()


def run(command, **environment):
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Lines of a dry run: what needs a GPU or the peers' packages is not run."""
    if shutil.which("bash") is None:
        pytest.skip("the script is of bash")
    results = tmp_path_factory.mktemp("dry") / "lines.jsonl"
    ended = run(
        ["bash", "benchmarks/gpu.sh", "--dry-run"], PYTHON=sys.executable, RESULTS=str(results)
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.slow
def test_steps_have_the_losses_of_the_peers(dry_run):
    """The models of both sides are the same: losses of three steps, parameters and FLOP."""
    lines = {line["shape"]: line for line in dry_run if line["kind"] == "step"}
    assert lines.keys() == PEER_STEPS.keys()
    for name, (losses, parameters, gflop) in PEER_STEPS.items():
        np.testing.assert_allclose(lines[name]["losses"], losses, rtol=1e-5, err_msg=name)
        assert lines[name]["parameters"] == parameters
        assert lines[name]["layer_gflop"] == pytest.approx(gflop)


@pytest.mark.slow
def test_the_script_runs_dry(dry_run):
    """Each part leaves lines."""
    lines = dry_run
    assert {line["kind"] for line in lines} == {
        "card",
        "check",
        "time",
        "step",
        "attention",
        "tier",
    }
    assert all(line["passed"] for line in lines if line["kind"] == "check")
    timed = [line for line in lines if line["kind"] in ("time", "step", "attention")]
    tier = [line for line in lines if line["kind"] == "tier"]
    checks = {line["shape"]: line for line in tier if "passed" in line}
    assert checks.keys() == {"whole", "dynamic", "cached_0.1"}
    assert all(line["passed"] for line in checks.values())
    assert checks["cached_0.1"]["evicted"] > 0
    timed += [line for line in tier if "passed" not in line]
    assert all(line["ms"][0] > 0 for line in timed)
    steps = step_shapes.chosen_steps(None, 1, is_small=True)
    assert {step.name for step in steps} == PEER_STEPS.keys()
    assert {"rows forward adam", "rows backward adam", "fused_update sgd"} <= {
        line["primitive"] for line in timed if line["kind"] == "time"
    }


def test_the_script_names_parts_that_are_not_there():
    ended = run(["bash", "benchmarks/gpu.sh", "--dry-run", "kernel"])
    assert ended.returncode == 2
    assert (
        "part 'kernel'; there are check, kernels, peers, steps, attention and tier" in ended.stderr
    )
