"""What holds for every test: tables as wide as where there is no terminal, no limits on times, and none measured in vain."""

import os

import torch
from hypothesis import settings

from rewrites import observe
from sj_tac.kernels.cpu import threads

os.environ["COLUMNS"] = "140"
# How long an example takes says what the machine does beside it.
settings.register_profile("sj_tac", deadline=None)
# For what runs a second time, under another SpikingJelly.
settings.register_profile("half", deadline=None, max_examples=50)
settings.load_profile("sj_tac")
# How a net's time compares with its source's is told by one round of each: only tests of the times read what is told.
observe.ROUNDS = 1
# Most nets of the tests are too small for threads to be worth their start. They start all the same, so that they are tested.
threads.ALONE //= 20
if not torch.cuda.is_available():
    # Without a device every seed is kept for later with the stack it was given in: a millisecond for each torch.manual_seed.
    torch.cuda.manual_seed_all = lambda seed: None
