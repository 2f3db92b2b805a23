# Everything from a bare checkout, one command each: `make lab` shows the lab at work, `make test` runs the tests.
PYTHON ?= python3
BIN := .venv/bin
# Three workers for two cores: some tests wait. The threads of NumPy and torch would fight with them. Bytecode is kept,
# whatever the shell says: the tests start hundreds of processes, and each imports the lab.
WORKERS ?= 3
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q --durations=10

.PHONY: docs lab lab-smoke test test-emulator test-more test-full lint newest types wheelhouse visit rehearsal setup clean

lab: setup
	$(BIN)/rooflab lab

lab-smoke: setup
	$(BIN)/rooflab lab --smoke

test: setup
	$(TEST) -m "not slow and not more"

# What takes long or needs more than Python: a browser, every kernel compiled and emulated, soaks.
test-more: setup
	$(TEST) -m "more and not slow"

test-full: setup
	$(TEST)

# The emulator alone, with its corpus: without the tests that run the lab's own commands, rungs and microkernels in it.
OF_THE_LAB := test_emulate.py test_emulated_registry.py test_ptx_microkernels.py test_ptx_mutants.py test_inputs.py test_printed.py test_launch_order.py
test-emulator: setup
	$(TEST) -m "not slow and not more" tests/emulator $(addprefix --ignore=tests/emulator/,$(OF_THE_LAB))

# The wheel with the newest torch and Triton, as a stranger installs it; TRITON=3.9.0 takes that release.
newest: setup
	$(BIN)/python .ci/newest.py $(if $(TRITON),--triton $(TRITON))

docs: setup
	$(BIN)/python docs/build.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# On the installed package: type checkers do not follow the editable map of five folders into one namespace.
types: setup
	rm -rf build/lib build/types && $(BIN)/python -m pip install -q --no-deps --no-build-isolation --target build/types .
	rm -rf rooflab.egg-info  # pytest would take it for a second installation
	cd build/types && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p rooflab
	cd build/types && MYPYPATH=.:../../results:../../results/visit ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache ../../results/*/*.py

# What a GPU machine without a network lacks, to be sent there with the checkout (bench/run_from_checkout.py).
wheelhouse: setup
	$(BIN)/python results/visit/wheelhouse.py

# The same with FlashAttention-3 and Liger's kernels, and the two commands of a visit of fifteen minutes to a card.
visit: setup
	$(BIN)/python results/visit/kit.py

# That visit on a CPU, with the versions of a card's machine; fetches gigabytes. PYTHON312 names a Python 3.12.
PYTHON312 ?= python3.12
rehearsal:
	$(PYTHON312) results/visit/rehearse.py

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt .ci/set_up.py
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) on the path; install Python 3.11 or later" >&2; exit 2; }
	@$(PYTHON) .ci/set_up.py
	@rm -rf rooflab.egg-info
	@touch $@

clean:
	rm -rf .venv build wheelhouse wheelhouse-1 results/local *.egg-info
