"""Whole files or none."""

import os
import stat

import pytest

from sj_tac import Policy
from sj_tac.errors import WriteError
from sj_tac.support.files import write_text, write_whole


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


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"file/p\.yaml cannot be written"):
        Policy().save(tmp_path / "file" / "p.yaml")
