"""Pipelines and records of runs."""
