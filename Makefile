# Two commands: `make run` trains on the embedded default, `make test` runs the tests. Each makes .venv when it is missing.
PYTHON ?= python3
TORCH ?= torch==2.13.*

run: .venv/ready
	.venv/bin/python -m grpo_fn.run --gin_file run/arithmetic.gin

test: .venv/ready
	.venv/bin/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch .venv/ready

.PHONY: run test
