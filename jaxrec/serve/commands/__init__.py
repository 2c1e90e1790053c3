"""Commands of trained models: quantize, export, predict."""
