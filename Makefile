# One word per task. Everything is installed into .venv; a second run starts at once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test golden arm lint bench docs docs-check matrix release-check browser clean
.DEFAULT_GOAL := demo

# torch comes first and alone: a later resolve finds it installed and leaves its build as it is.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -c constraints.txt torch numpy
	@$(PIP) -c constraints.txt --no-deps torchvision
	@$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)
	@$(BIN)/python -m nhwc demo

# Two workers, one torch thread each: the tests assert results, never times. Then those whose
# outcome is the processor's come again, as if it had no AVX-512, and as if it had no AVX at all.
PYTEST   := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
AVX2     := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NHWC_ISA=avx2
PORTABLE := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 NHWC_ISA=plain

test: $(READY) browser
	@$(PYTEST) $(ARGS)
ifeq ($(ARGS)$(shell uname -m),x86_64)
ifneq ($(shell grep -som1 avx512f /proc/cpuinfo),)
	@echo "again, as if there were no AVX-512" && $(AVX2) $(PYTEST) -m processor
endif
	@echo "again, as if there were no AVX" && $(PORTABLE) $(PYTEST) -m processor
endif

# What texts and pages should read, written anew: look at the changes before you commit them.
golden: $(READY) browser
	@$(BIN)/python -m pytest -q tests/render/test_golden.py --renew
	@-git diff --stat tests/render/golden

# The kernels for ARM, emulated: wants binutils-aarch64-linux-gnu.
arm: $(READY)
	@$(PIP) -c constraints.txt unicorn
	@$(BIN)/python -m pytest -p tests.emulated -k neon $(ARGS) \
		$(addprefix tests/kernels/,convolutions/test_conv.py convolutions/test_expanded.py \
			layers/test_steps.py)

lint: $(READY)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(READY)
	@$(BIN)/python -m nhwc bench resnet50

# The site, in build/site: open index.html there, no server is needed.
docs: $(READY)
	@$(PIP) -c constraints.txt -e ".[docs]"
	@rm -rf build/reports
	@$(BIN)/python -m website.build

docs-check: docs browser
	@$(BIN)/python -m website.walk

# Every Python and torch that can be had here, one after the other: hours, and 7 GB for a while.
matrix: $(READY)
	@$(BIN)/python -m benchmarks.matrix $(ARGS)

# docs/releasing.md says what is checked.
release-check: $(READY)
	@$(PIP) build twine
	@$(BIN)/python -m benchmarks.release

browser:
	@bash .ci/install-browser

clean:
	rm -rf $(VENV) build dist
