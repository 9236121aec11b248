# A fresh machine -> a virtual environment in .venv, and in it the demo, the tests or the linters.
#
#   make demo     classify the photographs in examples/images
#   make test     lint, then every test
#   make lint     ruff and mypy
#   make bench    gpuml beside other systems, 15 minutes; make bench BENCH=--quick in 3
#   make clean    remove all that these made, .venv too
#
# Needs Python 3.10 or newer; another one than python3: make PYTHON=python3.12 test
# What is missing (Java 17, Debian's venv package) is installed on Debian and Ubuntu as root; elsewhere make stops
# and says what to type. Everything comes from the package registries.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint bench clean java

demo: $(VENV)/demo.stamp java
	$(BIN)/python examples/quickstart.py

# Four files at a time, also on two cores: much of a Spark test is waiting for processes to start. In the order of their
# names: the plugin's own order leaves the files with the longest tests, such as test_docs.py, for one process at the end.
test: $(VENV)/test.stamp java lint
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers have an environment of their own, on top of this one: torch, Spark and gpuml are those of .venv. Daft asks
# for an older pyarrow than .venv has, so all peers use that one.
BENCH ?= --out
BENCH_VENV := .bench-venv
bench: $(BENCH_VENV)/stamp java
	cd examples/benchmarks && ../../$(BENCH_VENV)/bin/python -m bench $(BENCH)

$(BENCH_VENV)/stamp: $(VENV)/test.stamp
	@echo "Installing Ray, Daft and mlflow into $(BENCH_VENV): a minute and about 0.7 GB the first time"
	$(BIN)/python -m venv $(BENCH_VENV)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir({!r})".format(sysconfig.get_path("purelib")))' \
	  > "$$($(BENCH_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpuml.pth"
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  'ray==2.60.*' 'daft==0.7.*' 'mlflow-skinny==3.17.*' 'pandas<3'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage
	rm -rf artifacts spark-warehouse metastore_db derby.log .bench-venv .bench-data
	find gpuml tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is older than pyproject.toml when the dependencies may have changed.
$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing gpuml, PyTorch and Spark into $(VENV): some minutes and about 6 GB the first time"
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/test.stamp: pyproject.toml | $(BIN)/python
	@echo "Installing gpuml, PyTorch, Spark and the test tools into $(VENV): some minutes and about 6 GB the first time"
	$(PIP) --editable '.[test,lint]'
	@touch $@

# Shell: true where a missing package may be installed without asking.
CAN_INSTALL = [ -f /etc/debian_version ] && [ "$$(id -u)" = 0 ]
APT_INSTALL = DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends

# Debian ships Python without ensurepip; `python -m venv` would stop half-way and leave a .venv without pip.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "gpuml needs Python 3.10 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
	  echo "Name a newer one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  package=$$($(PYTHON) -c 'import sys; print("python{}.{}-venv".format(*sys.version_info))'); \
	  if $(CAN_INSTALL); then apt-get update -q && $(APT_INSTALL) $$package; \
	  else echo "$(PYTHON) has no ensurepip. Type: sudo apt-get install $$package" >&2; exit 1; fi; }
	$(PYTHON) -m venv $(VENV)

# Spark 4 runs on Java 17 or newer, and takes the one in JAVA_HOME first. Debian 13 has no 17 any more, but 21.
java:
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; \
	major() { "$$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p'; }; \
	enough() { [ "$$(major || true)" -ge 17 ] 2>/dev/null; }; \
	if ! enough && [ -z "$$JAVA_HOME" ] && $(CAN_INSTALL); then \
	  apt-get update -q && { $(APT_INSTALL) openjdk-17-jre-headless || $(APT_INSTALL) openjdk-21-jre-headless; }; \
	fi; \
	enough || { \
	  found=$$("$$java" -version 2>&1 | head -n 1); \
	  echo "Spark needs Java 17 or newer; $$java says: $$found"; \
	  if [ -n "$$JAVA_HOME" ]; then echo "Set JAVA_HOME to a newer one, or type: unset JAVA_HOME"; \
	  elif [ "$$(uname)" = Darwin ]; then \
	    echo 'Type: brew install openjdk@17 && export JAVA_HOME="$$(brew --prefix openjdk@17)"'; \
	  elif [ -f /etc/debian_version ]; then echo "Type: sudo apt-get install openjdk-17-jre-headless"; \
	  else echo "Type: sudo dnf install java-17-openjdk-headless   (or your system's package of Java 17)"; fi; \
	  exit 1; } >&2
