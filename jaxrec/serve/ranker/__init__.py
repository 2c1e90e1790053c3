"""Export and serving of rankers whose histories are cached."""
