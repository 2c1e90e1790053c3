"""Changes of tables, kept for consumers such as deltas and incremental checkpoints."""
