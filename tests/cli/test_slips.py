"""Slips on the command line: told without a second of imports; a factory's own error is told with the user's line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sj_tac.cli import load, named
from sj_tac.cli.named import UsageError

ROOT = Path(__file__).resolve().parents[2]
LINES = {"--help": 0, "search --help": 0, "polish": 2, "plan nets:X --polcy x": 2, "plan netz:X": 2}


def test_help_and_slips_import_neither_torch_nor_spikingjelly(tmp_path):
    script = (
        "import sys\nfrom sj_tac.cli.app import main\n"
        f"for line in {[*LINES]}:\n"
        "    sys.argv = ['sj-tac', *line.split()]\n"
        "    try:\n        main()\n    except SystemExit as left:\n        print('left', left.code)\n"
        "    else:\n        print('left 0')\n"
        "print('heavy', sorted({'torch', 'spikingjelly', 'numpy'} & set(sys.modules)))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "heavy []" in done.stdout
    assert "Traceback" not in done.stderr
    assert [int(line[5:]) for line in done.stdout.splitlines() if line.startswith("left ")] == [*LINES.values()]


FACTORIES = """
def undefined():
    return no_such_name

def wants(a, b=1):
    return a

def nested():
    import json
    return json.loads('{')

class Late:
    def __call__(self):
        raise KeyError('k')

late = Late()
"""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("factories:undefined", r"failed with NameError: name 'no_such_name' .* \(.*factories.py, line 3, in undefined\)"),
        ("factories:nested", r"failed with JSONDecodeError: .* \(.*factories.py, line 10, in nested\)"),
        ("factories:late", r"failed with KeyError: 'k' \(.*factories.py, line 14, in __call__\)"),
        ("factories:wants", "cannot be called without arguments .missing a required argument: 'a'"),
        ("torn:f", r"cannot be imported with SyntaxError: .*\(.*torn.py, line 1\)"),
        ("fails:f", r"cannot be imported with ZeroDivisionError: division by zero \(.*fails.py, line 2, in <module>\)"),
        ("lacks:f", r"cannot be imported \(No module named 'no_such_thing' \(.*lacks.py, line 1, in <module>\)\)"),
        ("a..b:x", "is no module's name"),
        (".a:x", "is no module's name"),
        ("factories:", "is not written as package.module:factory"),
        ("nowhere.at.all:x", "nowhere.at.all cannot be imported"),
        ("builtins:dict", "returned a dict; a factory returns"),
    ],
)
def test_a_factorys_own_error_is_the_users_with_its_line(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("factories.py").write_text(FACTORIES)
    Path("torn.py").write_text("def f(:\n")
    Path("fails.py").write_text("x = 1\ny = 1 / 0\n")
    Path("lacks.py").write_text("import no_such_thing\n")
    try:
        with pytest.raises(UsageError, match=words):
            load.model(spec, None)
    finally:
        for name in ("factories", "torn", "fails", "lacks"):
            sys.modules.pop(name, None)


def test_what_is_written_in_c_is_called():
    assert named.called(dict, "builtins:dict", "data") == {}
