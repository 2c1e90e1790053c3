"""Histories and candidates of rankers: schemas, requests, and batches by number of tokens."""
