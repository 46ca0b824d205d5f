"""What writers of specs, mutants and tests share: content, faults, grids, sets of floats."""
