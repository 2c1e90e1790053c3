"""How exactly rows and gradients travel between devices."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Format: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "float8"]
_FLOAT8_MAX = 448.0  # of float8_e4m3fn
_FLOAT16_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class Precision:
    """The formats in which a mesh's devices send each other embeddings and gradients.

    Ids and sums stay exact; what is received is float32 again before it is added. "float32" leaves
    values as they are (rows of 16-bit tables travel as such). "float16" cuts values to its range.
    "int8" and "float8" (e4m3) are scaled row by row, by a row's smallest and largest element or by
    its largest in size; they add 8 and 4 bytes to a row. TorchRec calls these quantized
    communications (``torchrec.distributed.fbgemm_qcomm_codec``).

    Attributes:
        forward: Format of embeddings, on their way to the samples.
        backward: Format of gradients, on their way to the rows.
        loss_scale: Gradients are multiplied by this before they travel and divided by it after, to
            keep small ones from vanishing in "float16".

    Raises:
        ValueError: If a format is unknown or the scale is not a positive number.

    Example:
        >>> Precision(forward="bfloat16", backward="float16", loss_scale=1024.0).forward
        'bfloat16'
    """

    forward: Format = "float32"
    backward: Format = "float32"
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) not in get_args(Format):
                raise ValueError(
                    f"precision: {name}={getattr(self, name)!r} is none of "
                    f"{', '.join(get_args(Format))}"
                )
        if not (np.isfinite(self.loss_scale) and self.loss_scale > 0):
            raise ValueError(f"precision: loss_scale={self.loss_scale} is not a positive number")


def encode(rows: Float[Array, "*lines dim"], format: Format) -> tuple[Array, ...]:
    """Rows as they travel: arrays whose leading axes are those of ``rows``."""
    match format:
        case "float32":
            return (rows,)
        case "bfloat16":
            return (rows.astype(jnp.bfloat16),)
        case "float16":
            return (jnp.clip(rows, -_FLOAT16_MAX, _FLOAT16_MAX).astype(jnp.float16),)
        case "int8":
            rows = rows.astype(jnp.float32)
            least = rows.min(axis=-1, keepdims=True)
            step = (rows.max(axis=-1, keepdims=True) - least) / 255
            codes = jnp.round((rows - least) / jnp.where(step > 0, step, 1))
            return codes.astype(jnp.uint8), least, step
        case "float8":
            rows = rows.astype(jnp.float32)
            scale = jnp.abs(rows).max(axis=-1, keepdims=True) / _FLOAT8_MAX
            codes = rows / jnp.where(scale > 0, scale, 1)
            return codes.astype(jnp.float8_e4m3fn), scale


def decode(parts: tuple[Array, ...], format: Format) -> Float[Array, "*lines dim"]:
    """The rows that `encode` made ``parts`` of; float32 if they were encoded at all."""
    match format:
        case "float32":
            return parts[0]
        case "int8":
            codes, least, step = parts
            return least + codes.astype(jnp.float32) * step
        case "float8":
            codes, scale = parts
            return codes.astype(jnp.float32) * scale
        case _:
            return parts[0].astype(jnp.float32)
