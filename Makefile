# make serve     serve the embedded model on 127.0.0.1:7433 and a Unix socket
# make test      the whole test suite
# make help      all targets

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
    $(name) -c 'import sys; print("$(name)" if (3, 11) <= sys.version_info < (3, 14) else "")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

# A GPU driver brings the CUDA extras; elsewhere the constraint keeps the release that zl is tested with on the CPU.
ifneq ($(wildcard /proc/driver/nvidia/version),)
EXTRA := [cuda]
CONSTRAINTS :=
else
EXTRA :=
CONSTRAINTS := -c constraints/cpu.txt
endif

.PHONY: help install pull serve test lint determinism dist soak rolling gpu-check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(VENV)/.installed ## make the virtual environment .venv with zl in it, nothing else

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "zl needs Python 3.11 to 3.13 as python3; set PYTHON=/path/to/it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "the venv module is missing: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.$(EXTRA)'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[test]'
	@touch $@

pull: install ## fetch the embedded model into the user's cache
	@$(BIN)/zl pull >/dev/null

serve: pull ## serve the embedded model, as ZL_* and ZL_CONFIG say; Ctrl-C ends it
	@exec $(BIN)/zl serve

test: $(VENV)/.installed-test pull ## run the tests; make test ARGS='-k cancel' picks some
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

lint: $(VENV)/.installed-test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

determinism: $(VENV)/.installed-test pull ## 200 requests alone, in 5 random orders with cancels, after a restart: equal to the last bit
	$(BIN)/python -m bench.determinism

dist: ## build the source distribution and the wheel into dist/
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/pip install --quiet build
	$(VENV)-dist/bin/python -m build --outdir dist .

soak: $(VENV)/.installed-test pull ## 10,000 requests to one server: nothing that lasts is allocated after the start
	$(BIN)/python -m bench.alloc --requests 10000 --model "$$($(BIN)/zl pull)"

rolling: $(VENV)/.installed-test ## 64 streaming clients while servers are switched, restarted, killed; needs haproxy
	$(BIN)/python -m bench.rolling $(ARGS)

gpu-check: $(VENV)/.installed-test ## prove and time the CUDA path on this machine's GPU; without one, its dry run on the CPU
ifneq ($(wildcard /proc/driver/nvidia/version),)
	$(BIN)/python -m bench.gpu_check $(ARGS)
else
	@echo "gpu-check: no NVIDIA driver on this machine; running the DRY mode, which is no GPU result"
	$(BIN)/python -m bench.gpu_check --dry $(ARGS)
endif

clean: ## remove the virtual environment and what tools left behind; the model cache stays
	rm -rf $(VENV) build dist zl.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find zl tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

include bench/peers.mk
