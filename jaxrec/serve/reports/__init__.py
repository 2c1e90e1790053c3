"""Comparison of a quantized model with the one it was made from."""
