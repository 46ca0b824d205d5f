"""Golden oracles: what the right bits are, in plain PyTorch."""
