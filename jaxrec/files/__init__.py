"""Files that are whole or not there: atomic writes, locks, checksums, and rows of tables.

Everything that saves uses these modules, which know nothing of models.
"""
