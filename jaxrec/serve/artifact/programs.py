"""StableHLO programs of a model, made by `jax.export` for each platform and batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export as jax_export

from jaxrec.embed import kernels
from jaxrec.embed.kernels.native_call import exported_targets
from jaxrec.ragged import KeyedArray, KeyedJaggedArray
from jaxrec.serve.artifact.batch_spec import (
    ArrayInput,
    ArrayOutput,
    BatchSize,
    BatchSpec,
    Structure,
    flatten,
    unflatten,
)
from jaxrec.serve.artifact.program_file import (
    is_of_jaxrec,
    parse_program,
    program_calls,
    unknown_calls,
)
from jaxrec.serve.artifact.pure_model import PureModel

# Implementations of the lookups in the programs of each platform: only those whose calls later
# versions of jaxrec and of JAX serve. Pallas kernels for GPUs are not among them.
KERNELS: Mapping[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("reference",)}


class Outputs(NamedTuple):
    """A program's outputs: their nesting, and the arrays in the order of its leaves."""

    structure: Structure
    arrays: tuple[ArrayOutput, ...]


class ModelPrograms(NamedTuple):
    """Programs of a model by platform and batch size.

    ``arrays`` names the model's arrays that an output depends on. All programs take them as their
    first arguments, before the arrays of the batch.
    """

    arrays: list[str]
    outputs: Outputs
    programs: dict[tuple[str, int], jax_export.Exported]


def export_programs(pure: PureModel, batch: BatchSpec, platforms: Sequence[str]) -> ModelPrograms:
    """Export a model for each of some platforms and each batch size."""
    names = list(pure.shapes)
    first, outputs = _export_program(
        pure, batch, batch.sizes[0], names, platforms[0], keep_unused=False
    )
    # The first trace drops unused arguments and so finds the arrays that outputs depend on: a query
    # tower needs no item tables. The others keep their arguments, so that all programs take the
    # same.
    used = used_arrays(first, names)
    is_first_complete = len(first.module_kept_var_idx) == len(first.in_avals)
    programs: dict[tuple[str, int], jax_export.Exported] = {}
    for platform in platforms:
        for size in batch.sizes:
            # If the first trace dropped none, it is already the first program.
            if is_first_complete and not programs:
                program = first
            else:
                program, outputs = _export_program(pure, batch, size, used, platform)
            programs[platform, size.samples] = program
    return ModelPrograms(used, outputs, programs)


def _export_program(
    pure: PureModel,
    batch: BatchSpec,
    size: BatchSize,
    names: Sequence[str],
    platform: str,
    *,
    keep_unused: bool = True,
) -> tuple[jax_export.Exported, Outputs]:
    """Export the model for one batch size and platform; describe its outputs.

    The program takes the arrays ``names`` of the model, then those of the batch. With
    ``keep_unused`` it also keeps arguments that no output depends on.
    """
    outputs: list[Outputs] = []

    def run(function: Callable[..., Any], arguments: list[Any]) -> list:
        structure, leaves = flatten(_plain(function(*_inputs(batch, size, arguments))), "output")
        results = [_checked_output(name, leaf, size.samples) for name, leaf in leaves]
        described = (
            ArrayOutput(name, leaf.dtype.name, leaf.shape[1:])
            for (name, _), leaf in zip(leaves, results, strict=True)
        )
        # A side effect of tracing: the structure is not part of jax.export's result.
        outputs.append(Outputs(structure, tuple(described)))
        return results

    exported = export_function(
        pure, run, batch.shapes(size), names, platform, keep_unused=keep_unused
    )
    return exported, outputs[-1]


def export_function(
    pure: PureModel,
    run: Callable[[Callable[..., Any], list[Any]], list],
    arguments: Sequence[jax.ShapeDtypeStruct],
    names: Sequence[str],
    platform: str,
    *,
    keep_unused: bool = True,
) -> jax_export.Exported:
    """Export a function of a model's arrays ``names`` and further arguments, for one platform.

    ``run`` gets the model's function, which has its arrays, and the further arguments. Arrays that
    are not named are zeros. With ``keep_unused`` the program keeps arguments that no result
    depends on.
    """
    shapes = pure.shapes

    def call(*given: Any) -> list:
        named = dict(zip(names, given, strict=False))
        arrays = {
            # Arrays without a name are zeros: no output depends on them.
            name: named[name] if name in named else jnp.zeros(shape.shape, shape.dtype)
            for name, shape in shapes.items()
        }
        return run(lambda *batch: pure(arrays, batch), list(given[len(names) :]))

    checks = [jax_export.DisabledSafetyCheck.custom_call(name) for name in exported_targets()]
    export = jax_export.export(
        jax.jit(call, keep_unused=keep_unused), platforms=(platform,), disabled_checks=checks
    )
    with kernels.use_kernels(*KERNELS[platform]):
        try:
            return export(*(shapes[name] for name in names), *arguments)
        except NotImplementedError as error:
            raise ValueError(f"the model cannot be exported: {error}") from error


def used_arrays(exported: jax_export.Exported, names: Sequence[str]) -> list[str]:
    """Return which of the arrays, a program's first arguments, its results depend on."""
    kept = exported.module_kept_var_idx
    return [name for index, name in enumerate(names) if index in kept]


def native_targets(exported: jax_export.Exported) -> tuple[str, ...]:
    """Return the functions of jaxrec's native library that a program calls.

    A ValueError names a function that exported programs may not call.
    """
    # Checked at export, by the same list as at loading: an error then comes to those who can change
    # the model.
    calls = program_calls(parse_program(exported.mlir_module_serialized))
    if unknown := unknown_calls(calls):
        raise ValueError(
            f"the model cannot be exported: its program calls {unknown[0]}, which is not one of "
            "the functions that exported programs may call; compute it by operations of JAX"
        )
    return tuple(each for each in calls if is_of_jaxrec(each))


def _inputs(batch: BatchSpec, size: BatchSize, arrays: list[Any]) -> tuple[Any, ...]:
    """Return the arguments of the model's function, made of the program's arrays of a batch."""
    leaves: list[Any] = []
    capacities = iter(size.capacities)
    for each in batch.inputs:
        if isinstance(each, ArrayInput):
            leaves.append(arrays.pop(0))
            continue
        values, lengths = arrays.pop(0), arrays.pop(0)
        leaves.append(
            KeyedJaggedArray(
                values,
                lengths,
                arrays.pop(0) if each.is_weighted else None,
                keys=each.keys,
                capacities=next(capacities),
                strides=(size.samples,) * len(each.keys),
            )
        )
    return unflatten(batch.structure, leaves)


def _plain(outputs: Any) -> Any:
    """Return nested outputs with a dict in place of each `KeyedArray`."""
    if isinstance(outputs, KeyedArray):
        return outputs.to_dict()
    if isinstance(outputs, dict):
        return {key: _plain(value) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple) and not hasattr(outputs, "_fields"):
        return type(outputs)(_plain(value) for value in outputs)
    return outputs


def _checked_output(name: str, leaf: Any, samples: int) -> jax.Array:
    if not isinstance(leaf, jax.Array):
        raise TypeError(
            f"{name} is a {type(leaf).__name__}; an exported function returns arrays with a "
            "leading batch axis, alone or in dicts, lists and tuples: give function="
        )
    if leaf.ndim == 0 or leaf.shape[0] != samples:
        raise ValueError(
            f"{name} has the shape {leaf.shape} for a batch of {samples} samples; an exported "
            "function returns arrays with a leading batch axis: give function="
        )
    return leaf
