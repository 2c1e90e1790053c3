"""Plans of batches on the host: which ids get rows, and how rows move."""
