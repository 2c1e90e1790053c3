"""The start of a job of several processes."""

from __future__ import annotations

import jax
from flax import nnx

# Seconds that an ending process waits for the others: after a failure they may wait for it in turn.
SHUTDOWN_SECONDS = 30

LOST_AFTER_SECONDS = 20


def join_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    lost_after: int = 20,
) -> None:
    """Join the processes that a launcher started, if one did.

    Call it before anything else of JAX. JAX recognises Slurm, Open MPI, Kubernetes and TPU pods.
    Without a launcher or arguments, this process stays alone.

    Args:
        coordinator: Address of process 0, ``host:port``, where JAX cannot detect it.
        num_processes: Number of processes, where JAX cannot detect it; 1: this one alone.
        process_id: Number of this process, from 0.

    Raises:
        ValueError: Some arguments are given, and others that are needed are not.
        RuntimeError: The other processes cannot be reached, or JAX has started already.
    """
    check_processes(coordinator, num_processes, process_id)
    if num_processes == 1 and coordinator is None:
        return
    by_hand = num_processes is not None or coordinator is not None
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, shutdown_timeout_seconds=SHUTDOWN_SECONDS
        )
    except (ValueError, RuntimeError) as error:
        # JAX's errors without a launcher, and where it has started already, as in a notebook.
        alone = ("coordinator_address", "must be called before")
        if by_hand or not any(reason in str(error) for reason in alone):
            raise


def check_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raise a ValueError where the options do not go together."""
    if coordinator is not None and None in (num_processes, process_id):
        raise ValueError("--coordinator needs --num-processes and --process-id")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"--num-processes is 1 or more, got {num_processes}")
    if process_id is not None and not 0 <= process_id < (num_processes or 1):
        raise ValueError(
            f"--process-id is one of 0 to --num-processes less 1, got {process_id} of "
            f"{num_processes}"
        )


def spans_processes(model: nnx.Module) -> bool:
    """Return whether a model is on devices of several processes."""
    leaves = jax.tree.leaves(nnx.state(model))
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves)
