"""Which ids have a row: admission, eviction, and the records that they go by."""
