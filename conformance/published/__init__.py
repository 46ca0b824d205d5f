"""Adapters for published kernels: those of an installed package, under the names of our ops."""
