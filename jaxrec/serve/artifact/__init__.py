"""Exported models: programs, with their tables and a description of their inputs."""
