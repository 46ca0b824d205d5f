"""Golden vectors: case files with the wanted outputs, made by `draftproof golden`."""
