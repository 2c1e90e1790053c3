"""XLA's options with which tests that read a compiled program compile it as users' programs are."""

from __future__ import annotations

import jax

# tests/conftest.py turns this off where it may be.
AS_USERS_DO = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
