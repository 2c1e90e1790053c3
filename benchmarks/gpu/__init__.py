"""Checks and times the kernels for GPUs; ``bash benchmarks/gpu.sh`` runs all of it."""
