"""Where each module is tested.

``jaxrec/x/y.py`` is tested by ``tests/x/test_y.py``, and a package within a package either so or as
a whole: ``jaxrec/x/y/z.py`` by ``tests/x/test_y.py``. A module that is tested through another one
is listed here, with the file that tests it.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

pytestmark = pytest.mark.every_case

ROOT = pathlib.Path(__file__).parents[1]

# By test file, the modules that it tests beside its own.
TESTED_BY = {
    "data/criteo/test_conversion": (
        "commands/data",
        "data/contiguous",
        "data/criteo/parts",
        "data/encode",
    ),
    "test_init": ("_public",),
    "data/criteo/test_exports": ("data/arrays",),
    "data/sequences/test_events": ("data/sequences/event_groups",),
    "data/sequences/test_requests": (
        "data/sequences/lists",
        "data/sequences/ranges",
        "data/sequences/request_groups",
        "data/sequences/rows",
        "data/sequences/schema",
    ),
    "data/test_column_types": ("data/column_values",),
    "data/test_encoder": ("data/statistics",),
    "data/test_infer": ("data/patterns",),
    "data/test_times": ("data/feature_table",),
    "data/test_files": ("data/parquet", "data/partitions", "data/views"),
    "data/test_split": ("data/last_of_each", "data/later_rows"),
    "data/test_vocabulary": ("data/distinct",),
    "embed/kernels/test_extents": ("embed/kernels/mosaic/extents", "embed/kernels/triton/extents"),
    "embed/kernels/test_flat_lookups": (
        "embed/kernels/mosaic/flat_lookups",
        "embed/kernels/triton/flat_lookups",
    ),
    "embed/kernels/test_gpu_kernels": (
        "embed/kernels/mosaic/instructions",
        "embed/kernels/mosaic/lanes",
        "embed/kernels/mosaic/lookups",
        "embed/kernels/mosaic/programs",
        "embed/kernels/mosaic/sorted_lookups",
        "embed/kernels/mosaic/stand_ins",
        "embed/kernels/mosaic/tile",
        "embed/kernels/mosaic/update",
        "embed/kernels/triton/lookups",
        "embed/kernels/triton/readers",
        "embed/kernels/triton/sorted_lookups",
        "embed/kernels/triton/tile",
    ),
    "embed/kernels/mosaic/hstu/test_kernels": (
        "embed/kernels/mosaic/hstu/key_gradients",
        "embed/kernels/mosaic/hstu/output",
        "embed/kernels/mosaic/hstu/query_gradients",
        "embed/kernels/mosaic/hstu/tiles",
    ),
    "embed/kernels/test_packed_updates": ("embed/kernels/mosaic/stored_rows",),
    "embed/kernels/test_primitives": (
        "embed/kernels/base",
        "embed/kernels/cpu",
        "embed/kernels/reference",
        "embed/kernels/updates",
    ),
    "embed/test_collection": (
        "embed/functional",
        "embed/layout",
        "embed/outputs",
    ),
    "embed/test_formats": ("embed/state",),
    "embed/test_training_step": ("embed/taps",),
    "embed/test_gradients": (
        "embed/optimizer",
        "embed/row_gradients",
    ),
    "embed/test_hyperparameters": ("optim/hyperparameters",),
    "embed/test_skipped_steps": ("embed/batch_checks",),
    "mesh/test_processes": ("mesh/agree",),
    "mesh/exchange/test_base": (
        "mesh/exchange/pooled",
        "mesh/exchange/rows",
    ),
    "mesh/test_training": (
        "mesh/placed_group",
        "mesh/shard_access",
        "mesh/shards",
        "mesh/tables",
        "mesh/sharding",
        "mesh/sharding_types",
    ),
    "metrics/test_definitions": (
        "metrics/averages",
        "metrics/classification",
        "metrics/entropy",
        "metrics/metric",
    ),
    "metrics/test_golden": ("metrics/sessions",),
    "nn/test_backbones": (
        "nn/finalmlp",
        "nn/gdcn",
        "nn/history_model",
        "nn/input_vectors",
        "nn/longer",
        "nn/masknet",
        "nn/onetrans",
        "nn/pepnet",
        "nn/rankmixer",
        "nn/token_attention",
        "nn/token_linear",
        "nn/transact",
        "nn/wukong",
    ),
    "nn/test_every_module": (
        "nn/crossnet",
        "nn/deepfm",
        "nn/hstu",
        "nn/transformers",
        "nn/wide_deep",
    ),
    "nn/test_hstu_ranker": (
        "nn/ranker_features",
        "nn/transduction_stack",
    ),
    "nn/test_pools": ("mesh/pool_rows",),
    "nn/test_ranker_serving": ("nn/history_cache",),
    "nn/test_semantic_id_decoder": ("nn/code_blocks", "nn/code_stacks", "nn/code_tokens"),
    "nn/test_tiled_attention": ("nn/jagged_tiles",),
    "optim/test_base": ("optim/checks",),
    "plan/test_solver": ("plan/program",),
    "ragged/test_packing": ("ragged/keyed_constructors",),
    "ragged/test_keyed_jagged": ("ragged/columns",),
    "serve/artifact/test_export": (
        "serve/artifact/inputs",
        "serve/artifact/programs",
        "serve/artifact/pure_model",
    ),
    "serve/artifact/test_load": ("serve/artifact/manifest", "serve/artifact/served"),
    "serve/http/test_app": (
        "serve/http/argument_columns",
        "serve/http/batcher",
        "serve/http/input_columns",
        "serve/http/metrics",
        "serve/http/bodies",
    ),
    "serve/http/test_server": (
        "commands/serve",
        "serve/http/limits",
    ),
    "serve/test_ranker": ("serve/artifact/ranker_spec",),
    "tier/ids/test_id_map": (
        "tier/ids/implementation",
        "tier/ids/library",
    ),
    "tier/deltas/test_publication": (
        "tier/deltas/folder",
        "tier/deltas/manifest",
        "tier/deltas/tables",
        "tier/deltas/version_writer",
    ),
    "tier/managed_collision/test_modules": ("tier/managed_collision/row_reset",),
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
    "train/test_requests": ("train/request_columns",),
    "train/test_checkpoint": (
        "embed/checkpoint_view",
        "embed/variables",
        "train/devices",
    ),
    "train/test_columns": ("train/features",),
    "train/test_config": ("train/option_groups",),
    "train/test_evaluation": ("train/routed_calls",),
    "tier/vocabulary/test_vocabulary": ("tier/vocabulary/assignment",),
    "train/test_hold_out": ("train/resumed",),
    "train/test_sweep": ("train/sweep_report",),
    "train/test_trainer": ("train/train_steps",),
    "train/test_following": ("train/stream_options",),
    "commands/test_commands": ("arguments",),
    "commands/test_export": ("serve/exported_run",),
    "serve/quantized/test_quality_report": ("serve/quantized/table_quality",),
    "nn/test_towers": ("mesh/towers",),
    "embed/kernels/sparse_core/test_lookups": ("embed/kernels/sparse_core/sums",),
}
LISTED = [module for modules in TESTED_BY.values() for module in modules]


def has_logic(path: pathlib.Path) -> bool:
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))


@functools.cache
def modules() -> set[str]:
    return {
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
    untested = {module for module in modules() if not has_mirror(module)} - set(LISTED)
    assert untested == set(), "write tests/x/test_y.py for jaxrec/x/y.py, or list it in TESTED_BY"


def test_only_modules_without_a_mirror_are_listed():
    assert len(LISTED) == len(set(LISTED))
    assert {module for module in LISTED if has_mirror(module)} == set()
    assert set(LISTED) - modules() == set(), "these modules are gone, or have no logic"


@pytest.mark.parametrize("path", [f"tests/{test}.py" for test in TESTED_BY])
def test_listed_test_files_exist(path):
    assert (ROOT / path).exists()


def test_programs_import_what_is_installed():
    """Without ``-P`` Python would import the checkout, which need not have the native libraries."""
    starts = re.compile(r'sys\.executable, "-[cm]"')
    found = [path for path in (ROOT / "tests").rglob("*.py") if starts.search(path.read_text())]
    assert found == [], 'start the program by [sys.executable, "-P", ...]'


def test_paths_that_contributors_are_told_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:jaxrec|tests|docs|benchmarks|cpp|\.ci)/[\w./-]*)`", text)
    assert len(paths) > 40
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    packages = re.findall(r"^\| `jaxrec\.([a-z]+)`", text, re.MULTILINE)
    assert {module.split("/")[0] for module in modules() if "/" in module} <= {*packages, "data"}
