"""The timeline of a scheduled program, by hand."""

from __future__ import annotations

import pathlib
import sys

import pytest

import jaxrec

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks.gpu.roofline import MEMORY, WITHIN, data_sheet
from benchmarks.gpu.timeline import PRODUCTS, timeline

# Rows travel while a product and a small kernel run, then back at once, and ids beside nothing.
PROGRAM = """HloModule step, is_scheduled=true

%gemm (p.0: f32[8192,4096], p.1: f32[4096,1024]) -> f32[8192,1024] {
  %p.0 = f32[8192,4096]{1,0} parameter(0)
  %p.1 = f32[4096,1024]{1,0} parameter(1)
  ROOT %dot.1 = f32[8192,1024]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%first (p.2: f32[1000000,128]) -> f32[1,1] {
  %p.2 = f32[1000000,128]{1,0} parameter(0)
  %flat = f32[128000000]{0} bitcast(%p.2)
  %one = f32[1]{0} slice(%flat), slice={[0:1]}
  ROOT %shaped = f32[1,1]{1,0} bitcast(%one)
}

%replace (p.3: f32[1000000,128], p.4: s32[1000,1], p.5: f32[1000,128]) -> f32[1000000,128] {
  %p.3 = f32[1000000,128]{1,0} parameter(0)
  %p.4 = s32[1000,1]{1,0} parameter(1)
  %p.5 = f32[1000,128]{1,0} parameter(2)
  ROOT %scatter.1 = f32[1000000,128]{1,0} scatter(%p.3, %p.4, %p.5), update_window_dims={1}
}

ENTRY %main (rows: f32[1000000,128], x: f32[8192,4096], w: f32[4096,1024], at: s32[1000,1]) -> f32[1] {
  %rows = f32[1000000,128]{1,0} parameter(0)
  %x = f32[8192,4096]{1,0} parameter(1)
  %w = f32[4096,1024]{1,0} parameter(2)
  %at = s32[1000,1]{1,0} parameter(3)
  %new = f32[1000,128]{1,0} parameter(4)
  %ids = s32[8000000]{0} parameter(5)
  %go = ((f32[1000000,128]{1,0}), f32[1000000,128]{1,0}) all-to-all-start(%rows), dimensions={0}, metadata={op_name="jit(step)/fetch/all_to_all"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %product = f32[8192,1024]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  %replaced = f32[1000000,128]{1,0} fusion(%rows, %at, %new), kind=kInput, calls=%replace
  %end = f32[1000000,128]{1,0} all-to-all-done(%go)
  %flag = f32[1,1]{1,0} fusion(%end), kind=kLoop, calls=%first
  %back = f32[1000000,128]{1,0} all-to-all(%end), dimensions={0}, metadata={op_name="jit(step)/all_to_all"}
  ROOT %sent = s32[8000000]{0} all-to-all(%ids), dimensions={0}
}
"""  # noqa: E501


def test_the_timeline_of_a_program():
    machine = data_sheet(jaxrec.plan.Topology.named("h200", devices=8))
    run = timeline(PROGRAM, machine)
    ahead, back, ids = run.transfers
    sent = 4 * 128_000_000 * 7 / 8 / WITHIN
    product = 2 * 8192 * 4096 * 1024 / PRODUCTS
    # The scatter reads places and new rows, and writes these rows alone.
    scatter = (4 * 1000 + 2 * 4 * 128_000) / MEMORY
    flag = (4 + 4) / MEMORY
    assert (ahead.start, ahead.seconds) == (0, pytest.approx(sent))
    assert ahead.under_products == pytest.approx(product)
    assert ahead.under_kernels == pytest.approx(product + scatter)
    assert (back.start, back.under_kernels) == (pytest.approx(sent + flag), 0)
    assert [each.is_rows for each in run.transfers] == [True, True, False]
    assert run.seconds == pytest.approx(2 * sent + flag + ids.seconds)
    assert run.share_under_products("/fetch/") == pytest.approx(product / sent)
    assert run.share_under_products() == pytest.approx(product / sent / 2)


def test_a_product_of_a_library():
    call = """HloModule step

ENTRY %main (x: f32[8192,4096], w: f32[4096,1024]) -> (f32[8192,1024], s8[4]) {
  %x = f32[8192,4096]{1,0} parameter(0)
  %w = f32[4096,1024]{1,0} parameter(1)
  ROOT %gemm = (f32[8192,1024]{1,0}, s8[4]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}
"""  # noqa: E501
    run = timeline(call, data_sheet(jaxrec.plan.Topology.named("h200", devices=8)))
    assert run.seconds == pytest.approx(2 * 8192 * 4096 * 1024 / PRODUCTS)
