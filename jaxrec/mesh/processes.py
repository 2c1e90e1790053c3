"""The processes of a job: how they find each other as they start."""

from __future__ import annotations

import jax

# Seconds that a process that ends waits for the others: one that fails must not wait for those that
# wait for it.
SHUTDOWN_SECONDS = 30


def join_processes(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes that a launcher started, if one did; before anything else of JAX.

    JAX recognises Slurm, Open MPI, Kubernetes and TPU pods. Where it finds no launcher, and none of
    the arguments says otherwise, this process stays alone.

    Args:
        coordinator: Address of process 0, ``host:port``, where JAX cannot find it out.
        num_processes: Processes, where JAX cannot find it out; 1: this one alone.
        process_id: This process, from 0.

    Raises:
        ValueError: Some arguments are given, and others that are needed are not.
        RuntimeError: The others cannot be reached, or JAX has begun already.
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
        # What JAX says where it finds no launcher, and where it has begun, in a notebook say.
        alone = ("coordinator_address", "must be called before")
        if by_hand or not any(reason in str(error) for reason in alone):
            raise


def check_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raises ValueError where the options do not go together."""
    if coordinator is not None and None in (num_processes, process_id):
        raise ValueError("--coordinator needs --num-processes and --process-id")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"--num-processes is 1 or more, got {num_processes}")
    if process_id is not None and not 0 <= process_id < (num_processes or 1):
        raise ValueError(
            f"--process-id is one of 0 to --num-processes less 1, got {process_id} of "
            f"{num_processes}"
        )
