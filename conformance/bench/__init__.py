"""Benchmarks: what is timed, how, and what the timings of one run add up to."""
