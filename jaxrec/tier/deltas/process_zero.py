"""Work that process 0 does for all processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import jax

from jaxrec.mesh.agree import gather_texts

Result = TypeVar("Result")


def on_process_zero(function: Callable[[], Result]) -> Result:
    """Call a function in process 0, and return its result in all processes; each calls this.

    Args:
        function: Returns what JSON can hold.

    Raises:
        OSError: The function raised an OSError or a ValueError. Process 0 raises that error itself.
    """
    if jax.process_count() == 1:
        return function()
    answer: dict = {}
    error: Exception | None = None
    if jax.process_index() == 0:
        try:
            answer = {"result": function()}
        except (OSError, ValueError) as raised:
            error, answer = raised, {"error": str(raised)}
    first = json.loads(gather_texts(json.dumps(answer))[0])
    if error is not None:
        raise error
    if "error" in first:
        raise OSError(f"process 0 failed: {first['error']}")
    return first["result"]
