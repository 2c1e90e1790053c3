"""Formats in which rows and gradients travel between devices."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Format: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "float8"]
DenseFormat: TypeAlias = Literal["float32", "bfloat16"]
_FLOAT8_MAX = 448.0  # of float8_e4m3fn
_FLOAT16_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class ExchangePrecision:
    """Formats in which a mesh's devices send each other embeddings and gradients.

    Ids travel exactly, and received values become float32 before they are added. The formats:

    - "float32" sends values in their own type, so rows of 16-bit tables travel in 16 bits.
    - "bfloat16" rounds values to 16 bits. "float16" does too, and clips them to its range.
    - "int8" scales each row by its smallest and largest element, which adds 8 bytes to the row.
    - "float8" (e4m3) scales each row by its largest absolute element, which adds 4 bytes.

    TorchRec calls these quantized communications (``torchrec.distributed.fbgemm_qcomm_codec``).

    Attributes:
        forward: Format of embeddings, on their way to the samples.
        backward: Format of gradients, on their way to the rows.
        loss_scale: Factor of gradients while they travel. It keeps small gradients from becoming 0
            in "float16".
        dense: Format of gradients of dense parameters, on their way to the devices that add them.
            "bfloat16" needs a mesh of Explicit axes. It applies to parameters of two or more axes
            that have at least `jaxrec.mesh.MIN_SHARDED_SIZE` elements; see docs/sharding.md.

    Raises:
        ValueError: A format is unknown, or the scale is not a positive number.

    Example:
        >>> ExchangePrecision(forward="bfloat16", backward="float16", loss_scale=1024.0).forward
        'bfloat16'
    """

    forward: Format = "float32"
    backward: Format = "float32"
    loss_scale: float = 1.0
    dense: DenseFormat = "float32"

    def __post_init__(self) -> None:
        for name, formats in (("forward", Format), ("backward", Format), ("dense", DenseFormat)):
            if getattr(self, name) not in get_args(formats):
                raise ValueError(
                    f"precision: {name}={getattr(self, name)!r} is not one of "
                    f"{', '.join(get_args(formats))}"
                )
        if not (np.isfinite(self.loss_scale) and self.loss_scale > 0):
            raise ValueError(f"precision: loss_scale={self.loss_scale} is not a positive number")


def encoded_bytes(format: Format, width: int, bytes: int) -> int:
    """Return the bytes of a row of ``width`` columns in a format.

    ``bytes`` is the size of the row in its own type.
    """
    match format:
        case "float32":
            return bytes
        case "int8":
            return width + 8
        case "float8":
            return width + 4
        case _:
            return 2 * width


def encode(rows: Float[Array, "*lines dim"], format: Format) -> tuple[Array, ...]:
    """Return rows in a format, as one array or several, such as codes and scales."""
    match format:
        case "float32":
            return (rows,)
        case "bfloat16":
            return (rows.astype(jnp.bfloat16),)
        case "float16":
            # One infinite element would make its whole sum infinite.
            return (jnp.clip(rows, -_FLOAT16_MAX, _FLOAT16_MAX).astype(jnp.float16),)
        case "int8":
            rows = rows.astype(jnp.float32)
            least = rows.min(axis=-1, keepdims=True)
            step = (rows.max(axis=-1, keepdims=True) - least) / 255
            # A row of equal elements has a step of 0, and so has codes of 0.
            codes = jnp.round((rows - least) / jnp.where(step > 0, step, 1))
            return codes.astype(jnp.uint8), least, step
        case "float8":
            rows = rows.astype(jnp.float32)
            scale = jnp.abs(rows).max(axis=-1, keepdims=True) / _FLOAT8_MAX
            codes = rows / jnp.where(scale > 0, scale, 1)
            return codes.astype(jnp.float8_e4m3fn), scale


def decode(parts: tuple[Array, ...], format: Format) -> Float[Array, "*lines dim"]:
    """Return the float32 rows of `encode`'s result. The format "float32" keeps the rows' type."""
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
