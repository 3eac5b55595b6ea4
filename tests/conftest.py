"""What holds for every test: tables as wide as where there is no terminal, and no limit on the time of a drawn example."""

import os

from hypothesis import settings

os.environ["COLUMNS"] = "140"
# How long an example takes says what the machine does beside it.
settings.register_profile("sj_tac", deadline=None)
# For what runs a second time, under another SpikingJelly.
settings.register_profile("half", deadline=None, max_examples=50)
settings.load_profile("sj_tac")
