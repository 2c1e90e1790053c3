"""Programs compiled for TPUs on a machine without one."""
