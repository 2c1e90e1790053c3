"""Programs of a Mosaic kernel: their numbers, and their launch on a GPU or in an interpreter."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

# The grid's axis. Users' meshes have axes of other names.
_PROGRAMS = "jaxrec_program"

# In an interpreter: returns the program's number.
_stand_in: contextvars.ContextVar[Callable[[], Array] | None] = contextvars.ContextVar(
    "jaxrec_mosaic_stand_in", default=None
)


def is_interpreted() -> bool:
    """Return whether kernels are traced for an interpreter."""
    return _stand_in.get() is not None


def program() -> Int32[Array, ""]:
    """Return this program's number among all programs."""
    return (_stand_in.get() or _program_on_gpu)()


def _program_on_gpu() -> Int32[Array, ""]:
    return jax.lax.axis_index(_PROGRAMS)


@contextlib.contextmanager
def interpreted(number: Callable[[], Array] = _program_on_gpu) -> Iterator[None]:
    """Trace a kernel for an interpreter, with `stand_ins` in place of `indexing`.

    ``number`` returns the program's number. By default Mosaic's own interpreter does.
    """
    token = _stand_in.set(number)
    try:
        yield
    finally:
        _stand_in.reset(token)


def launch(
    kernel: Callable[..., None],
    name: str,
    programs: int,
    inputs: Sequence[Array],
    targets: Sequence[Any],
    interpreter: Any = None,
) -> list[Array]:
    """Run ``kernel(*inputs, *targets)``, a function of references, in each program on a GPU.

    Targets are `jax.ShapeDtypeStruct` for new arrays, or arrays that are changed in place.
    ``interpreter`` are parameters of Mosaic's interpreter, which then runs the kernel.
    """
    # Mosaic changes an array in place if it gets a reference to it.
    changed = [jax.new_ref(each) for each in targets if not _is_new(each)]

    def in_order(changed: Iterable[Any], new: Iterable[Any]) -> list[Any]:
        changed, new = iter(changed), iter(new)
        return [next(new if _is_new(each) else changed) for each in targets]

    def body(*refs: Any) -> None:
        first, last = len(inputs), len(inputs) + len(changed)
        with contextlib.nullcontext() if interpreter is None else interpreted():
            kernel(*refs[:first], *in_order(refs[first:last], refs[last:]))

    new = plgpu.kernel(
        body,
        out_type=list(filter(_is_new, targets)),
        grid=(programs,),
        grid_names=(_PROGRAMS,),
        kernel_name=name,
        interpret=interpreter,
    )(*inputs, *changed)
    return in_order([each[...] for each in changed], new)


def interpret(
    kernel: Callable[..., None],
    name: str,
    programs: int,
    inputs: Sequence[Array],
    targets: Sequence[Any],
) -> list[Array]:
    """Run a kernel as `launch` does, but one program after another and without a GPU."""

    def run(inputs: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        refs = [jax.new_ref(each) for each in arrays]

        def run_program(number: Array, _: None) -> None:
            with interpreted(lambda: number.astype(jnp.int32)):
                kernel(*inputs, *refs)

        jax.lax.fori_loop(0, programs, run_program, None)
        return [each[...] for each in refs]

    run.__name__ = name
    return jax.jit(run)(inputs, [_unwritten(x) if _is_new(x) else x for x in targets])


def _is_new(target: Any) -> bool:
    return isinstance(target, jax.ShapeDtypeStruct)


def _unwritten(new: jax.ShapeDtypeStruct) -> Array:
    """Return a new array of numbers that no test takes for a result."""
    is_float = jnp.issubdtype(new.dtype, jnp.floating)
    return jnp.full(new.shape, jnp.nan if is_float else jnp.iinfo(new.dtype).max, new.dtype)
