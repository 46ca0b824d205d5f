"""Compiles every kernel for GPUs that are not here, and refuses what spills."""
