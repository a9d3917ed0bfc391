"""Without a GPU the kernels run interpreted; the choice must be made before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
