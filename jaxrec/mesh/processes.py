"""The start of a job of several processes."""

from __future__ import annotations

import jax
from flax import nnx

from jaxrec.mesh.watch import LOST_AFTER_SECONDS, watch_processes

# Seconds that an ending process waits for the others: after a failure they may wait for it in turn.
SHUTDOWN_SECONDS = 30

# Seconds by which JAX's own notice of a lost process comes after that of `watch_processes`.
_LATER = 10


def join_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    lost_after: int = LOST_AFTER_SECONDS,
) -> None:
    """Join the processes that a launcher started, if one did.

    Call it before anything else of JAX, in the place of `jax.distributed.initialize`. JAX
    recognises Slurm, Open MPI, Kubernetes and TPU pods. Without a launcher or arguments, this
    process stays alone.

    If a process is lost later, all others end within ``lost_after`` and some seconds with exit code
    1. Their last line on standard error names the lost process.

    Args:
        coordinator: Address of process 0, ``host:port``, where JAX cannot detect it.
        num_processes: Number of processes, where JAX cannot detect it; 1: this one alone.
        process_id: Number of this process, from 0.
        lost_after: Seconds without an answer of its host after which a process counts as lost. A
            process that is killed or crashes is noticed at once.

    Raises:
        ValueError: Some arguments are given, and others that are needed are not; ``lost_after`` is
            below 1.
        RuntimeError: The other processes cannot be reached, or JAX has started already.

    Example:
        >>> import jaxrec
        >>> jaxrec.mesh.join_processes(num_processes=1)
        >>> jax.process_count()
        1
    """
    check_processes(coordinator, num_processes, process_id)
    if lost_after < 1:
        raise ValueError(f"lost_after is a number of seconds of 1 or more, got {lost_after}")
    if num_processes == 1 and coordinator is None:
        return
    by_hand = num_processes is not None or coordinator is not None
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=lost_after + _LATER,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        # JAX's errors without a launcher, and where it has started already, as in a notebook.
        alone = ("coordinator_address", "must be called before")
        if by_hand or not any(reason in str(error) for reason in alone):
            raise
        return
    watch_processes(lost_after)


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
