"""Maps of ids and operations on batches of ids, in C++ with a reference in NumPy."""
