"""The checking engine: op specs, checks, golden vectors, mutants and the command line."""
