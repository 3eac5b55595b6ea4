"""What holds for every test: printed tables are as wide as where there is no terminal, whoever runs the tests."""

import os

os.environ["COLUMNS"] = "140"
