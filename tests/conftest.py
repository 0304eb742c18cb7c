"""Hypothesis profiles, chosen by the environment variable HYPOTHESIS_PROFILE."""

import os

import torch
from hypothesis import settings

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Tensors in tests are small: a second thread only costs, and one thread keeps the order of sums fixed.
torch.set_num_threads(1)
