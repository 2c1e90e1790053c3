"""Environment of commands that compile for described cards, on a machine without one."""

from __future__ import annotations

import os


def compile_without_cards(devices: int = 16) -> None:
    """Give this process ``devices`` simulated CPU devices, and no card; call it before JAX starts.

    XLA then picks no fastest GEMM, which it would time on a card.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["XLA_FLAGS"] = (
        f"--xla_gpu_autotune_level=0 --xla_force_host_platform_device_count={devices} "
        + os.environ.get("XLA_FLAGS", "")
    )
