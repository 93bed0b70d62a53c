"""Settings that every test shares."""

import torch

torch.set_num_threads(1)  # the suites of several parts run side by side
