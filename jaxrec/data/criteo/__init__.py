"""Criteo's click logs: their text, and their conversion to Parquet, npy files and records."""
