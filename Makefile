# Every target sets up .venv by itself, on a bare machine too (ci/setup_env.py says what it chose).
#   make verify ARGS="--op c128_cleanup --profile full"     the main job: draftproof verify
#   make test   ARGS="conformance -x"                       the whole test suite: pytest
#   PYTHON=python3.12 make setup                            another base Python
#   TORCH_INDEX=URL make setup                              torch from the index at URL

ARGS ?=
# Processes that `make test` spreads the tests over; more of them want more GPU memory.
JOBS ?= 2
BIN := .venv/bin
ROOMS := oracles kernels conformance accuracy ci
TYPED := .cache/typecheck/draftproof

# No child process finds the rooms under their bare names through its working folder.
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := verify
.PHONY: setup verify test bench lint docs clean

setup:
	@sh ci/setup.sh

verify: setup
	$(BIN)/draftproof verify $(ARGS)

test: setup
	$(BIN)/pytest -n $(JOBS) --dist loadgroup $(ARGS)

bench: setup
	$(BIN)/draftproof bench $(ARGS)

# The type checker sees the rooms as draftproof.<room> through links, as they are installed.
lint: setup
	@mkdir -p $(TYPED)
	@for room in $(ROOMS); do ln -sfn ../../../$$room $(TYPED)/$$room; done
	@failed=0; for check in "ruff check ." "ruff format --check ." "mypy"; do \
		echo "$$check"; $(BIN)/python -m $$check || failed=1; done; exit $$failed

# The site, in .cache/site; a link that leads nowhere fails. The API is read through lint's links.
docs: setup
	@mkdir -p $(TYPED)
	@for room in $(ROOMS); do ln -sfn ../../../$$room $(TYPED)/$$room; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

include accuracy/accuracy.mk

clean:
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .benchmarks
