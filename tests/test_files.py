"""Whole files or none."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sj_tac.errors import WriteError
from sj_tac.support.files import beside, check_place, own_descriptor, write_text, write_whole


def test_a_new_file_has_the_rights_of_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "deep" / "a.txt", "ä")
    finally:
        os.umask(before)
    assert (tmp_path / "deep" / "a.txt").read_bytes() == "ä".encode()
    assert stat.S_IMODE((tmp_path / "deep" / "a.txt").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("x"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail(draft):
        draft.write_text("ne")
        raise error

    expected = WriteError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as raised:
        write_whole(path, fail)
    if expected is WriteError:
        assert "No space left" in str(raised.value)
        assert "what was there before is unchanged" in str(raised.value)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_of_a_link_the_target_is_written(tmp_path):
    real, link = tmp_path / "real" / "a.txt", tmp_path / "link.txt"
    real.parent.mkdir()
    real.write_text("old")
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    real.unlink()
    write_text(link, "again")  # of a link to nothing, what it points to
    assert link.is_symlink()
    assert real.read_text() == "again"
    assert [p.name for p in real.parent.iterdir()] == ["a.txt"]


def test_a_pipe_is_handed_the_bytes_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "through")
        assert os.read(reader, 100) == b"through"
        with pytest.raises(KeyError):  # what fails half way hands nothing on
            write_whole(pipe, lambda draft: {}["x"])
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("name", ["/dev/fd/1", "/proc/self/fd/1"])
def test_stdout_is_written_in_turn(tmp_path, name):
    """Not by /dev/stdout, which is a link that a fault here would replace for the whole machine."""
    assert own_descriptor("/dev/stdout") == own_descriptor(name) == 1
    assert own_descriptor(tmp_path / "stdout") is None
    script = (
        f"from sj_tac.support.files import write_text\nprint('before')\nwrite_text({name!r}, 'written\\n')\nprint('behind')"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with (tmp_path / "log").open("ab") as file:  # as "sj-tac ... >> log" does it
        file.write(b"kept\n")
        file.flush()
        subprocess.run([sys.executable, "-c", script], env=environment, stdout=file, check=True)
    assert (tmp_path / "log").read_bytes() == b"kept\nbefore\nwritten\nbehind\n"


def test_what_can_be_no_file_is_said_before(tmp_path):
    (tmp_path / "file").write_text("")
    check_place(tmp_path / "new" / "deep" / "a.txt")
    for path, words in (
        (tmp_path, "it is a folder; name a file"),
        (tmp_path / "file" / "deep" / "a.txt", "file is no folder"),
    ):
        with pytest.raises(WriteError, match=words):
            check_place(path)
        with pytest.raises(WriteError, match=f"{path.name} cannot be written"):
            write_text(path, "x")
    with pytest.raises(WriteError, match="it is a folder"):
        check_place("")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_picture_never_replaces_the_file_that_it_stands_beside(tmp_path):
    assert beside(tmp_path / "a.json", ".png") == tmp_path / "a.png"
    for name in ("a.png", "a.PNG"):
        with pytest.raises(WriteError, match="would be replaced by the picture"):
            beside(tmp_path / name, ".png")
    with pytest.raises(WriteError, match=r"beside which the \.png could stand"):
        beside("/dev/stdout", ".png")
