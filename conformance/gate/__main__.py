"""`python -P -m draftproof.conformance.gate`: the compile gate as a command."""

from draftproof.conformance.gate.compile_gate import app

if __name__ == "__main__":
    app()
