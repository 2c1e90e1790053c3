"""The HTTP endpoint of exported models."""
