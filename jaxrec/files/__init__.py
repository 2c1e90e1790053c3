"""Files that are whole or not there: atomic writes, locks, checksums, and rows of tables.

Everything that saves stands on these modules. They know nothing of models.
"""
