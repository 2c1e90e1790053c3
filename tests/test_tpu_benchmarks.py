"""The script that compiles programs for TPUs, where libtpu is not installed."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# The benchmarks are no installed package. Behind the installed jaxrec, which stays what is tested.
sys.path.append(str(ROOT))

from benchmarks.gpu.roofline import instructions_of_entry  # noqa: E402
from benchmarks.tpu.findings import (  # noqa: E402
    Collective,
    bytes_moved,
    collectives,
    copies,
)
from benchmarks.tpu.pages import RESULTS, Results, page  # noqa: E402
from benchmarks.tpu.programs import Program, every  # noqa: E402

# Lines as libtpu 0.0.50.1 writes them, attributes left out.
PROGRAM = """\
HloModule jit_train, is_scheduled=true

%body (x: f32[8,128]) -> f32[8,128] {
  %copy.1 = f32[2000,128]{1,0:T(8,128)} copy(%x)
  ROOT %loop = s32[8,483,1]{1,2,0:T(1,128)S(1)} all-to-all(%copy.1), replica_groups={{0,1}}
}

ENTRY %main (param.44: f32[2000,128]) -> f32[] {
  %copy.2 = f32[4000]{0:T(1024)S(1)} copy(%param.60), backend_config={}
  %copy-start.1 = (f32[4000]{0:T(1024)S(1)}, f32[4000]{0:T(1024)}, u32[]{:S(2)}) copy-start(%p)
  %copy-start.2 = (f32[9]{0:T(1024)}, f32[9]{0:T(1024)}, u32[]{:S(2)}) copy-start(%q)
  %all_to_all.63 = s32[8,483,1]{1,2,0:T(1,128)S(1)} all-to-all(%all_to_all.62), channel_id=1
  %all-reduce.12 = (f32[]{:T(128)}, f32[256,1024]{1,0:T(8,128)S(1)}) all-reduce(%a, %b)
  %all-gather-start.3 = (f32[4,2]{1,0}, f32[32,2]{1,0}) all-gather-start(%c), dimensions={0}
  %fusion.1 = f32[8]{0} fusion(%d), kind=kLoop, calls=%fused
  %sort.1 = (s32[8]{0}, s32[8]{0}) sort(%e, %f), dimensions={0}
  %all-gather-done.3 = f32[32,2]{1,0} all-gather-done(%all-gather-start.3)
}
"""


def test_collectives_of_the_entry_have_their_bytes_and_the_work_under_them():
    assert list(collectives(PROGRAM)) == [
        Collective("all-to-all", 4 * 8 * 483, None),
        Collective("all-reduce", 4 + 4 * 256 * 1024, None),
        Collective("all-gather", 4 * 32 * 2, 2),
    ]


def test_copies_of_tables_count_in_hbm_alone():
    shapes = frozenset([(2000, 128), (4000,), (7, 7), (9,)])
    assert list(copies(PROGRAM, shapes)) == ["[9]", "[2000,128]"]


def test_rows_that_are_reached_by_number_are_the_bytes_moved():
    program = """\
ENTRY %main (a: f32[9000,128]) -> f32[9000,128] {
  %table = f32[9000,128]{1,0:T(8,128)} parameter(0)
  %rows = s32[640]{0:T(1024)S(1)} parameter(1)
  %gather_fusion.1 = f32[640,128]{1,0:T(8,128)S(1)} fusion(%table, %rows), kind=kCustom
  %scatter_custom_fusion.2 = f32[9000,128]{1,0:T(8,128)} fusion(%table, %rows, %gather_fusion.1)
  %add.3 = f32[640,128]{1,0:T(8,128)} fusion(%gather_fusion.1, %gather_fusion.1), kind=kLoop
}
"""
    entry = instructions_of_entry(program)
    moved = {}
    for name, each in entry.items():
        moved[name] = bytes_moved(each, [entry[operand].shape for operand in each.operands])
    row, numbers = 4 * 128, 4 * 640
    assert moved["gather_fusion.1"] == 2 * 640 * row + numbers
    assert moved["scatter_custom_fusion.2"] == 3 * 640 * row + numbers  # reads, writes, new rows
    assert moved["add.3"] == 3 * 640 * row


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return list(every())


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RESULTS.glob("compiled.tpu-*.md")), ids=lambda x: x.stem)
def test_pages_are_what_the_script_writes(path, programs):
    text = path.read_text()
    chip, versions = re.match(r"# Programs compiled for a TPU (\w+) by (.+)\n", text).groups()
    assert path.name == f"compiled.tpu-{chip}.jax-{versions.split(',')[0].split()[1]}.md"
    assert page(chip, Results.read(path), programs, versions) == text


def test_no_supported_program_fails_on_the_pages(programs):
    is_supported = {each.name: each.is_supported for each in programs}
    paths = sorted(RESULTS.glob("compiled.tpu-*.md"))
    assert {path.name.split("-")[1].split(".")[0] for path in paths} == {"v5e", "v5p", "v6e"}
    for path in paths:
        results = Results.read(path)
        assert results.lines.keys() <= is_supported.keys()
        assert not [x for name, x in results.reasons.items() if x and is_supported[name]]


def test_results_of_some_programs_leave_the_others(tmp_path, programs):
    first, second, *_ = (each.name for each in programs)
    results = Results({first: f"| {first} | v5e | 1 |"}, {first: [f"{first} for v5e copies."]})
    path = tmp_path / "page.md"
    path.write_text(page("v5e", results, programs, "JAX 1, libtpu 2"))
    again = Results.read(path)
    assert again == results
    again.add(second, f"| {second} | v5e | 2 |", [])
    text = page("v5e", again, programs, "JAX 1, libtpu 2")
    assert f"| {first} | v5e | 1 |\n| {second} | v5e | 2 |\n" in text
    assert f"- {first} for v5e copies.\n" in text
