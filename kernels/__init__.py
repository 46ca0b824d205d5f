"""Triton kernels, their launchers, unfused baselines and dispatch rules."""
