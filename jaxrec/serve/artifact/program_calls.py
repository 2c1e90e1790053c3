"""Functions that an exported program calls: their names for `jax.export`, and checks of a program.

A custom call runs a function of the process by its name, with arguments that the program chooses.
Some functions take an address among them, so that a program from elsewhere may call only those that
are known to check theirs.
"""

from __future__ import annotations

import re
from typing import Any

from jax import export as jax_export
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxrec.embed.kernels import cpu
from jaxrec.embed.kernels.native_call import exported_targets

# Functions of JAX that check their arguments, and names that XLA turns into operations of its own.
# `src/program_calls.cc` of cpp/ has the same.
_OF_JAX = re.compile(
    r"lapack_[a-z]+_ffi|cu(solver|sparse)_[a-z0-9]+_ffi"
    r"|cu_(threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement"
    r"|AllocateBuffer|shape_assertion|mhlo\.(topk|erf|tan|ragged_dot)"
)

_CUSTOM_CALL = "stablehlo.custom_call"

# Operations that wait for the host or another device.
_TRANSFERS = ("stablehlo.infeed", "stablehlo.outfeed", "stablehlo.recv", "stablehlo.send")


def parse_program(content: bytes) -> Any:
    """Parse a portable StableHLO artifact as an `ir.Module`.

    Raises:
        Exception: The content is something else.
    """
    context = mlir.make_ir_context()
    # Keep MLIR from printing: its message is part of the error.
    with context:
        handler: Any = context.attach_diagnostic_handler(lambda diagnostic: True)
        try:
            return stablehlo.deserialize_portable_artifact(context, content)
        finally:
            handler.detach()


def program_calls(module: Any) -> tuple[str, ...]:
    """Return the targets of a module's custom calls, and the names of its transfers to the host."""
    calls = set()

    def visit(operation: Any) -> Any:
        if operation.name == _CUSTOM_CALL:
            calls.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
        elif operation.name in _TRANSFERS:
            calls.add(operation.name)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return tuple(sorted(calls))


def is_of_jaxrec(target: str) -> bool:
    """Return whether a target is a function of jaxrec's native library."""
    return target.startswith("jaxrec")


def unknown_calls(calls: tuple[str, ...]) -> list[str]:
    """Return the calls that are neither of jaxrec's native library nor known ones of JAX."""
    known = exported_targets()
    return [each for each in calls if each not in known and not _OF_JAX.fullmatch(each)]


def native_calls() -> list[jax_export.DisabledSafetyCheck]:
    """Return the ``disabled_checks`` with which `jax.export` takes jaxrec's native functions.

    On a CPU lookups, updates and dot products call jaxrec's library, and JAX exports calls only
    that it knows. A program with such calls runs where jaxrec was imported, and its first lookup of
    any kind, or ``native_calls()``, has loaded the library. Later versions of jaxrec serve the
    lookups; the other calls are those of this version. Within
    ``jaxrec.embed.kernels.use_kernels("reference")`` programs are exported without native calls.

    `jaxrec.serve.export` needs none of this.

    Returns:
        One check for each function of the library.

    Example:
        >>> import jax, jaxrec, numpy as np
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=10, embedding_dim=4)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], [7]]})
        >>> exported = jax.export.export(
        ...     jax.jit(lambda batch: model(batch).values), disabled_checks=native_calls())(batch)
        >>> exported.call(batch).shape
        (2, 4)
    """
    cpu.missing()  # loads the library, where there is one
    return [jax_export.DisabledSafetyCheck.custom_call(name) for name in cpu.library_targets()]
