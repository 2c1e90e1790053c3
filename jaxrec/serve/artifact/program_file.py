"""Reading a program's file: its types and its calls are checked before it runs.

A custom call runs a function of the process by its name, with arguments that the program chooses.
Some functions take an address as an argument. So a program from elsewhere may call only functions
that are known to check their arguments.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export as jax_export
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxrec.embed.kernels import cpu
from jaxrec.embed.kernels.native_call import exported_targets
from jaxrec.serve.artifact.manifest import ArtifactError, Manifest, Program
from jaxrec.serve.artifact.ranker_spec import RankerProgram

# Functions of JAX that check their arguments, and names that XLA turns into its own operations. The
# list says what is allowed: a list of dangerous names would grow with every version of JAX.
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

# Element types of MLIR that are not a letter and a number of bits.
_ELEMENTS = {
    "bool": "i1",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "complex64": "complex<f32>",
}


def native_calls() -> list[jax_export.DisabledSafetyCheck]:
    """Return the ``disabled_checks`` with which `jax.export` accepts jaxrec's native functions.

    On a CPU, lookups, updates and dot products call functions of jaxrec's library. `jax.export`
    refuses to export calls that it does not know, unless their checks are disabled.

    A process that runs such a program must import jaxrec and load the library: by any lookup, or by
    ``native_calls()``. Later versions of jaxrec run the program's lookups. Its updates and dot
    products are certain to run only with the version of jaxrec that exported it. Within
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


class Signature(NamedTuple):
    """A program, its arguments behind the arrays of the manifest, and its results."""

    program: Program | RankerProgram
    arguments: Sequence[jax.ShapeDtypeStruct]
    results: Sequence[jax.ShapeDtypeStruct]


def read_program(
    directory: pathlib.Path, manifest: Manifest, signature: Signature
) -> jax_export.Exported:
    """Read a program's file, and check its calls and types against the manifest."""
    program = signature.program
    path = directory / program.file
    try:
        exported = jax_export.deserialize(bytearray(path.read_bytes()))
        module = parse_program(exported.mlir_module_serialized)
        calls = program_calls(module)
        taken, returned = _signature(module)
    # Damage may raise anything in the readers of flatbuffers and MLIR.
    except Exception as error:
        raise ArtifactError(
            f"{path} cannot be read by JAX {jax.__version__} ({_first_line(error)}); it was "
            f"exported with JAX {manifest.jax}"
        ) from error
    _check_calls(path, program, calls)
    arguments = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in manifest.arrays]
    arguments += signature.arguments
    if exported.platforms != (program.platform,) or exported.nr_devices != 1:
        raise ArtifactError(
            f"{path} is for {exported.nr_devices} devices of {', '.join(exported.platforms)}, and "
            f"the model has it for one of {program.platform}; export the model again"
        )
    # Effects, such as callbacks, run code of the host or wait for it.
    if exported.ordered_effects or exported.unordered_effects:
        raise ArtifactError(f"{path} has effects beside its results; export the model again")
    _check_types(path, "takes", arguments, exported.in_avals, taken)
    _check_types(path, "returns", signature.results, exported.out_avals, returned)
    return exported


def _check_calls(
    path: pathlib.Path, program: Program | RankerProgram, calls: tuple[str, ...]
) -> None:
    """Raise an ArtifactError where a program calls an unknown function, or one not in its entry.

    ``program`` is the manifest's entry; ``calls`` are the functions that the program calls.
    """
    if unknown := unknown_calls(calls):
        why = (
            "a later version of jaxrec exported it; install that version"
            if is_of_jaxrec(unknown[0])
            else "which jaxrec does not know and exported programs may not call; load models of "
            "those that you trust alone"
        )
        raise ArtifactError(f"{path} calls {unknown[0]}: {why}")
    own = [each for each in calls if is_of_jaxrec(each)]
    if undeclared := [each for each in own if each not in program.targets]:
        raise ArtifactError(
            f"{path} calls {undeclared[0]}, which the manifest does not list; export the model "
            "again"
        )


def _check_types(
    path: pathlib.Path,
    verb: str,
    wanted: Sequence[jax.ShapeDtypeStruct],
    described: Sequence[Any],
    typed: Sequence[str],
) -> None:
    """Raise an ArtifactError where a program's arguments or results differ from the manifest's.

    ``wanted`` has the manifest's shapes, ``described`` those that jax.export's file names, and
    ``typed`` the types of the program itself as MLIR writes them, such as ``tensor<4x8xf32>``.
    """
    # Both are compared: the file's description stands beside the program, and may differ from it.
    pairs = [(tuple(each.shape), each.dtype) for each in wanted]
    if [(tuple(each.shape), each.dtype) for each in described] != pairs or list(typed) != [
        _mlir_type(*pair) for pair in pairs
    ]:
        raise ArtifactError(
            f"{path} {verb} {', '.join(typed) or 'nothing'}; by the manifest it {verb} "
            f"{', '.join(_mlir_type(*pair) for pair in pairs) or 'nothing'}"
        )


def _mlir_type(shape: tuple[int, ...], dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    # "float32" is letters and bits, "f32" in MLIR; types of fewer bits have names of their own.
    bits = name.lstrip("abcdefghijklmnopqrstuvwxyz")
    letters = {"int": "i", "uint": "ui", "float": "f"}.get(name.removesuffix(bits), name)
    return f"tensor<{''.join(f'{size}x' for size in shape)}{_ELEMENTS.get(name, letters + bits)}>"


def _signature(module: Any) -> tuple[list[str], list[str]]:
    """Return the types of the arguments and of the results of a module's main function."""
    for operation in module.body.operations:
        if operation.operation.name == "func.func" and operation.name.value == "main":
            kind = operation.type
            return [str(each) for each in kind.inputs], [str(each) for each in kind.results]
    raise ValueError("it has no function main")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def parse_program(content: bytes) -> Any:
    """Parse a portable StableHLO artifact as an `ir.Module`."""
    context = mlir.make_ir_context()
    # Keep MLIR from printing: its message is part of the error.
    with context:
        handler: Any = context.attach_diagnostic_handler(lambda diagnostic: True)
        try:
            return stablehlo.deserialize_portable_artifact(context, content)
        finally:
            handler.detach()


def program_calls(module: Any) -> tuple[str, ...]:
    """Return the functions that a module calls, and the names of its transfers to the host."""
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
    """Return whether a call's target, the function's name, is one of jaxrec's native library."""
    return target.startswith("jaxrec")


def unknown_calls(calls: tuple[str, ...]) -> list[str]:
    """Return the calls of functions that neither jaxrec's native library nor the list above has."""
    known = exported_targets()
    return [each for each in calls if each not in known and not _OF_JAX.fullmatch(each)]
