"""Rows on their way between devices and row stores: first values, records, transfers."""
