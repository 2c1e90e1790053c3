"""Exported models: programs with their tables and their inputs beside them."""
