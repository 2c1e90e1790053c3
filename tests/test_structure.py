"""Where each module is tested.

``jaxrec/x/y.py`` is tested by ``tests/x/test_y.py``, and a package within a package either so or as
a whole: ``jaxrec/x/y/z.py`` by ``tests/x/test_y.py``. A module that is tested through another one
is listed here, with the file that tests it.
"""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

pytestmark = pytest.mark.every_case

ROOT = pathlib.Path(__file__).parents[1]

# By test file, the modules that it tests beside its own.
TESTED_BY = {
    "test_init": ("_public",),
    "data/test_binary": (
        "data/npz",
        "data/records",
    ),
    "data/test_click_batches": ("data/clicks",),
    "data/test_conversion": (
        "data/cli",
        "data/contiguous",
        "data/encode",
        "data/groups",
        "data/learn",
        "data/parts",
        "data/text",
    ),
    "data/test_common_types": (
        "data/suspects",
        "data/whole_floats",
    ),
    "data/test_encoder": ("data/list_lengths",),
    "data/test_files": ("data/parquet_file",),
    "data/test_schema": ("data/column_types",),
    "embed/kernels/test_primitives": (
        "embed/kernels/base",
        "embed/kernels/cpu",
        "embed/kernels/flat_lookups",
        "embed/kernels/reference",
    ),
    "embed/kernels/test_packed": ("embed/kernels/cpu_packed",),
    "embed/test_collection": (
        "embed/functional",
        "embed/initialize",
        "embed/row_wise",
        "embed/layout",
        "embed/lookup",
    ),
    "embed/test_formats": ("embed/state",),
    "embed/test_differentiate": (
        "embed/differentiation",
        "embed/taps",
    ),
    "embed/test_gradients": (
        "embed/optimizer",
        "embed/row_gradients",
    ),
    "embed/test_hyperparameters": (
        "optim/hyperparameter",
        "optim/wrapper",
    ),
    "embed/test_rows": (
        "embed/found_ids",
        "embed/some_rows",
        "embed/table_access",
    ),
    "embed/test_skipped_steps": ("embed/not_finite",),
    "mesh/test_capacity": ("mesh/ahead",),
    "mesh/test_channel": ("mesh/simulated",),
    "mesh/test_batch_counts": ("mesh/notes",),
    "mesh/test_processes": ("mesh/agree", "plan/one_plan"),
    "mesh/exchange/test_base": (
        "mesh/exchange/bags",
        "mesh/exchange/clipping",
        "mesh/exchange/pooled",
        "mesh/exchange/replicated",
        "mesh/exchange/rows",
    ),
    "mesh/exchange/test_pooled_by_host": ("mesh/host_group",),
    "mesh/test_dense": (
        "embed/placed_variables",
        "mesh/dense_placement",
    ),
    "mesh/test_training": (
        "mesh/layout",
        "mesh/placed_group",
        "mesh/shard",
        "mesh/shard_access",
        "mesh/shards",
        "mesh/tables",
    ),
    "metrics/test_definitions": (
        "metrics/areas",
        "metrics/averages",
        "metrics/classification",
        "metrics/entropy",
        "metrics/latest",
        "metrics/metric",
        "metrics/multilabel",
        "metrics/ranking",
        "metrics/regression",
    ),
    "metrics/test_golden": (
        "metrics/session_auc",
        "metrics/session_pairs",
        "metrics/sessions",
    ),
    "nn/test_every_module": (
        "nn/bert4rec",
        "nn/crossnet",
        "nn/dcn",
        "nn/deepfm",
        "nn/dense",
        "nn/dice",
        "nn/factorization",
        "nn/hstu",
        "nn/linear",
        "nn/positions",
        "nn/sasrec",
        "nn/swish",
        "nn/wide_deep",
    ),
    "nn/test_interaction": ("nn/pair_derivatives",),
    "nn/test_multi_tower": (
        "mesh/towers",
        "nn/towers",
    ),
    "nn/test_pools": ("mesh/pool_rows",),
    "nn/test_tiled_attention": ("nn/jagged_tiles",),
    "optim/test_base": (
        "optim/checks",
        "optim/ema",
        "optim/frozen",
    ),
    "plan/test_cli": ("plan_command",),
    "plan/test_plan": ("plan/context",),
    "plan/test_solver": ("plan/program",),
    "ragged/test_hashing": ("ragged/xxh64",),
    "ragged/test_packer": ("ragged/capacity_memory",),
    "ragged/test_packing": ("ragged/keyed_constructors",),
    "ragged/test_keyed_jagged": (
        "ragged/arrays",
        "ragged/columns",
    ),
    "serve/quantized/test_pruned_tables": ("serve/quantized/quantized_store",),
    "serve/reports/test_quality_report": (
        "serve/quantized/paired_stores",
        "serve/reports/quality_plot",
        "serve/reports/table_quality",
    ),
    "serve/artifact/test_export": (
        "serve/artifact/inputs",
        "serve/artifact/programs",
        "serve/artifact/pure_model",
    ),
    "serve/artifact/test_column_files": ("serve/artifact/column_encoding",),
    "serve/artifact/test_load": (
        "serve/artifact/files",
        "serve/artifact/manifest",
    ),
    "serve/artifact/test_program_file": ("serve/artifact/program_calls",),
    "serve/commands/test_export": (
        "data/frozen_vocabulary",
        "serve/commands/frozen_run",
    ),
    "serve/commands/test_predict": ("serve/artifact/outputs",),
    "serve/http/test_app": (
        "serve/http/argument_columns",
        "serve/http/arrow_body",
        "serve/http/batcher",
        "serve/http/description",
        "serve/http/errors",
        "serve/http/input_column",
        "serve/http/input_columns",
        "serve/http/json_body",
        "serve/http/metrics",
    ),
    "serve/http/test_raw_columns": ("data/examples",),
    "serve/http/test_server": (
        "serve/commands/serve",
        "serve/http/body",
        "serve/http/protocol",
    ),
    "serve/quantized/test_quantize": (
        "serve/quantized/packing",
        "serve/quantized/row_formats",
    ),
    "serve/artifact/test_requests": ("serve/artifact/batch_spec",),
    "serve/commands/test_quantize": ("serve/quantized/saved_run",),
    "serve/test_swap": ("serve/quantized/model_copy",),
    "tier/vocabulary/test_cached": ("tier/cached_tables",),
    "tier/test_stored_runs": ("tier/close",),
    "tier/ids/test_id_map": (
        "tier/ids/implementation",
        "tier/ids/library",
    ),
    "tier/deltas/test_publication": (
        "tier/deltas/checked_stream",
        "tier/deltas/folder",
        "tier/deltas/manifest",
        "tier/deltas/plain_table",
        "tier/deltas/open_table",
        "tier/deltas/process_zero",
        "tier/deltas/table",
        "tier/deltas/tables",
        "tier/deltas/version_plan",
        "tier/deltas/version_writer",
    ),
    "tier/deltas/test_subscriber": ("tier/deltas/compatibility",),
    "tier/managed_collision/test_modules": ("tier/managed_collision/row_reset",),
    "tier/changes/test_change_tracker": ("tier/changes/tracked_table",),
    "tier/test_row_file": ("tier/row_columns",),
    "tier/stores/test_file_store": (
        "tier/stores/record_file",
        "tier/stores/record_header",
    ),
    "tier/stores/test_redis_store": ("tier/stores/redis_server",),
    "tier/stores/test_rocksdb_store": ("tier/stores/rocksdb_database",),
    "tier/stores/test_row_store": ("tier/stores/snapshots",),
    "tier/planning/test_tier": (
        "tier/planning/model_tables",
        "tier/planning/moves",
    ),
    "train/test_checkpoint": (
        "embed/checkpoint_view",
        "embed/variables",
        "train/devices",
    ),
    "train/test_cli": (
        "arguments",
        "cli",
    ),
    "train/test_columns": (
        "train/features",
        "train/model_columns",
    ),
    "train/test_evaluation": ("train/routed_calls",),
    "train/test_options": ("train/config",),
    "train/test_trainer": ("train/train_steps",),
    "train/test_progress": (
        "train/summary",
        "train/trace",
    ),
}
LISTED = [module for modules in TESTED_BY.values() for module in modules]


def has_logic(path: pathlib.Path) -> bool:
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))


MODULES = {
    path.relative_to(ROOT / "jaxrec").with_suffix("").as_posix()
    for path in (ROOT / "jaxrec").rglob("*.py")
    if path.stem != "__init__" and has_logic(path)
}


def has_mirror(module: str) -> bool:
    *packages, name = module.split("/")
    mirrors = ["/".join([*packages, f"test_{name}.py"])]
    if len(packages) > 1:
        mirrors.append("/".join([*packages[:-1], f"test_{packages[-1]}.py"]))
    return any((ROOT / "tests" / mirror).exists() for mirror in mirrors)


def test_every_module_with_logic_is_tested():
    untested = {module for module in MODULES if not has_mirror(module)} - set(LISTED)
    assert untested == set(), "write tests/x/test_y.py for jaxrec/x/y.py, or list it in TESTED_BY"


def test_only_modules_without_a_mirror_are_listed():
    assert len(LISTED) == len(set(LISTED))
    assert {module for module in LISTED if has_mirror(module)} == set()
    assert set(LISTED) - MODULES == set(), "these modules are gone, or have no logic"


@pytest.mark.parametrize("path", [f"tests/{test}.py" for test in TESTED_BY])
def test_listed_test_files_exist(path):
    assert (ROOT / path).exists()


def test_programs_import_what_is_installed():
    """Without ``-P`` Python would import the checkout, which need not have the native libraries."""
    starts = re.compile(r'sys\.executable, "-[cm]"')
    found = [path for path in (ROOT / "tests").rglob("*.py") if starts.search(path.read_text())]
    assert found == [], 'start the program by [sys.executable, "-P", ...]'
