"""Event files that a user hands in: sorted with a warning, or refused with file, field, place and value."""

from pathlib import Path

import datasets
import dvs128
import numpy as np
import pytest
import torch
from event_files import DataError, DataWarning, check_archive, check_table, checked
from hypothesis import given, strategies as st
from short_runs import generated_gestures, gesture_folder

EVENTS = {"t": [5, 5, 9, 20, 31], "x": [0, 1, 33, 2, 2], "y": [3, 3, 0, 33, 4], "p": [0, 1, 1, 0, 1]}


@given(st.permutations(range(5)))
def test_events_in_any_order_are_sorted_and_events_of_one_time_stay_as_they_stand(order):
    columns = {name: np.array(values)[list(order)] for name, values in EVENTS.items()}
    moved = bool((np.diff(columns["t"]) < 0).any())
    if moved:
        with pytest.warns(
            DataWarning, match=r"here: events are not in order of time \(t\[\d\] is \d+, after \d+\); they are sorted"
        ):
            found = checked(columns, 34, "here")
    else:
        found = checked(columns, 34, "here")
    rows = list(zip(*(columns[name] for name in "txyp"), strict=True))
    assert list(zip(*(found[name] for name in "txyp"), strict=True)) == sorted(rows, key=lambda row: row[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [0, 1, 34, 2, 2]}, r"file\.bin: x\[2\] is 34, outside the sensor of 34 x 34 pixels"),
        ({"y": [3, -1, 0, 33, 4]}, r"y\[1\] is -1, outside the sensor"),
        ({"p": [0, 1, 2, 0, 1]}, r"p\[2\] is 2; polarity is 0 \(off\) or 1 \(on\)"),
        ({"p": [-1, 1, 1, 1, 1]}, r"p\[0\] is -1"),
        ({"t": [5, 5, 9, -20, 31]}, r"t\[3\] is -20; times are microseconds from 0 to 2\^50"),
        ({"t": [0.5, 5, 9, 20, 31]}, r"t has dtype float64; integers \(microseconds\) are expected"),
        ({"x": list("abcde")}, r"x has dtype <U1; integers are expected"),
        ({"t": np.array([5, 5, 9, 20, 2**64 - 1], np.uint64)}, r"t\[4\] is 18446744073709551615; it must be in"),
        ({"t": [5, 5, 9, 20, 2**61]}, r"t\[4\] is 2305843009213693952; times are microseconds from 0 to 2\^50"),
        ({"x": [[0, 1, 33, 2, 2]]}, r"x has shape \[1, 5\]; one integer for each event"),
        ({"y": [3, 3]}, r"its columns have different lengths, \{'t': 5, 'x': 5, 'y': 2, 'p': 5\}"),
        (dict.fromkeys("txyp", np.zeros(0, int)), r"file\.bin has no events; leave this recording out"),
    ],
)
def test_events_that_cannot_be_right_are_refused(change, message):
    with pytest.raises(DataError, match=message):
        checked(EVENTS | change, 34, "file.bin")


ARCHIVE = {
    "x": np.array([1, 2, 3], np.uint8), "y": np.array([4, 5, 6], np.uint8), "p": np.packbits([1, 0, 1]),
    "dt_us": np.array([0, 7, 0], np.uint16), "offsets": np.array([0, 2, 3]), "label": np.array([4, 9]),
    "is_test": np.array([1, 0]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": np.array([1, 0, 1], np.uint8)}, r"p has 3 values of uint8; .* are packed bits, 1 bytes .*numpy\.packbits"),
        ({"p": np.array([True])}, r"p has 1 values of bool"),
        ({"offsets": np.array([0, 2.5, 3])}, r"offsets has dtype float64; integers are expected"),
        ({"offsets": np.array([1, 2, 3])}, r"offsets\[0\] is 1; recordings begin at event 0"),
        ({"offsets": np.array([0, 4, 3])}, r"offsets\[2\] is 3, before offsets\[1\] = 4"),
        ({"offsets": np.array([0, 3, 3])}, r"recording 1 has no events \(offsets\[1:3\] are both 3\)"),
        ({"offsets": np.array([0, 2, 4])}, r"\{'x': 3, 'y': 3, 'dt_us': 3\} events do not fit its offsets, which end at 4"),
        ({"offsets": np.array([0, 3])}, r"2 labels do not fit 2 offsets"),
        ({"label": np.array([4, -1])}, r"label\[1\] is -1; labels are class indices"),
        ({"label": np.array([12, 1])}, r"label\[0\] is 12; labels are class indices, the digits 0 to 9"),
        ({"is_test": np.array([1, 2])}, r"is_test\[1\] is 2"),
        ({"dt_us": np.array([0, 0.007, 0])}, r"dt_us has dtype float64; integers \(microseconds\)"),
        ({"x": np.array([1, 2], np.uint8)}, r"'x': 2"),
        ({"label": np.zeros(0, int), "is_test": np.zeros(0, int), "offsets": np.array([0])}, "has no recordings"),
    ],
)  # fmt: skip
def test_archives_that_do_not_fit_are_refused(change, message):
    assert check_archive(ARCHIVE, "archive.npz").keys() == ARCHIVE.keys()
    with pytest.raises(DataError, match=message):
        check_archive(ARCHIVE | change, "archive.npz")


def test_frames_of_an_archive_are_its_events_counted_and_a_pixel_outside_is_named():
    frames, labels = datasets.event_frames(ARCHIVE, 2)
    assert labels.tolist() == [4, 9]
    assert [tuple(place) for place in frames.nonzero().tolist()] == [(0, 0, 1, 4, 1), (0, 1, 1, 6, 3), (1, 0, 0, 5, 2)]
    with pytest.raises(DataError, match=r"my\.npz, recording 1: x\[0\] is 200, outside the sensor of 34 x 34"):
        datasets.event_frames(ARCHIVE | {"x": np.array([1, 2, 200], np.uint8)}, 2, "my.npz")
    backwards = ARCHIVE | {"dt_us": np.array([9, -7, 0])}
    with pytest.warns(DataWarning, match="recording 0: events are not in order"):
        found, _ = datasets.event_frames(backwards, 2)
    assert [tuple(place) for place in found.nonzero().tolist()][-1] == (1, 0, 1, 4, 1)


def write_bin(path, t, x, y, p):
    """One N-MNIST recording: five bytes an event, x, y, polarity and 23 bits of time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    t = np.asarray(t)
    path.write_bytes(np.stack([x, y, np.asarray(p) << 7 | t >> 16, t >> 8 & 255, t & 255], 1).astype(np.uint8).tobytes())


def test_bin_files_out_of_order_give_the_frames_of_sorted_ones(tmp_path):
    pytest.importorskip("tonic")
    turned = {name: values[::-1] for name, values in EVENTS.items()}
    write_bin(tmp_path / "in order" / "Test" / "3" / "00001.bin", **EVENTS)
    write_bin(tmp_path / "newest first" / "Test" / "3" / "00001.bin", **turned)
    expected, labels = datasets.nmnist_folder(tmp_path / "in order", False, 3)
    assert labels.tolist() == [3]
    assert expected.sum() == 5
    with pytest.warns(DataWarning, match=r"00001\.bin: events are not in order of time"):
        found, _ = datasets.nmnist_folder(tmp_path / "newest first", False, 3)
    assert torch.equal(found, expected)
    write_bin(tmp_path / "outside" / "Test" / "3" / "00002.bin", **EVENTS | {"y": [3, 3, 0, 200, 4]})
    with pytest.raises(DataError, match=r"00002\.bin: y\[3\] is 200, outside the sensor"):
        datasets.nmnist_folder(tmp_path / "outside", False, 3)


def test_gestures_that_tonic_hands_out_are_checked(tmp_path):
    pytest.importorskip("tonic")
    gesture_folder(tmp_path / "good", recorded := generated_gestures(200))
    turned = [events[::-1] for events in recorded]
    gesture_folder(tmp_path / "turned", turned)
    outside = [events.copy() for events in recorded]
    outside[0][7, 0] = 128
    gesture_folder(tmp_path / "outside", outside)
    gesture_folder(tmp_path / "cut", [np.zeros(3), *recorded[1:]])

    def first(folder):
        source = dvs128.with_tonic(tmp_path / folder, 4, 16, 0)
        rows = [path.endswith("0.npy") for path in map(str, source.test.dataset.dataset.paths)]
        ((frames, _),) = source.test.load([torch.tensor([rows.index(True)])], [0])
        return frames

    expected = first("good")
    assert expected.sum() > 100
    with pytest.warns(DataWarning, match="not in order of time"):
        found = first("turned")
    # Events of one millisecond are counted alike, in whatever order they stand.
    assert torch.equal(found, expected)
    with pytest.raises(DataError, match=r"0\.npy: x\[7\] is 128, outside the sensor of 128 x 128"):
        first("outside")
    with pytest.raises(DataError, match=r"0\.npy: an array \[3\] of float64; a table \[events, 4\] of numbers is expected"):
        first("cut")


TABLE = np.array([[1, 2, 1, 5], [3, 4, 0, 6], [5, 6, 1, 7]], float)


def at(row, column, value, dtype=float):
    changed = TABLE.astype(dtype)
    changed[row, column] = value
    return changed


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (at(1, 0, 65541), r"x\[1\] is 65541, outside the sensor of 128 x 128"),
        (at(1, 1, 0.5), r"y\[1\] is 0\.5; whole numbers are expected"),
        (at(2, 0, np.nan), r"x\[2\] is nan; whole numbers"),
        (at(1, 2, 3), r"p\[1\] is 3; polarity is 0 \(off\) or 1 \(on\)"),
        (at(2, 2, -1, np.int16), r"p\[2\] is -1; polarity"),
        (at(2, 3, np.inf), r"t\[2\] is inf; times are milliseconds from 0 to"),
        (
            at(2, 3, 3_000_000, np.int32),
            r"t\[2\] is 3000000; times are milliseconds from 0 to 2147483, which int32",
        ),
        (TABLE.astype(str), r"an array \[3, 4\] of <U32; a table"),
        (np.zeros(3, [("x", "i2"), ("y", "i2"), ("p", "i2"), ("t", "i8")]), r"an array \[3\] of \[\('x', '<i2'\)"),
    ],
)
def test_tables_whose_values_a_reader_would_cast_away_are_refused(table, message, tmp_path):
    check_table(TABLE, 128, "r.npy")
    np.save(tmp_path / "r.npy", table)
    with pytest.raises(DataError, match=r"r\.npy: " + message):
        dvs128.Recordings(None, [str(tmp_path / "r.npy")], None, is_table=True)[0]


@pytest.mark.parametrize("folder", ["12", "-1", "zebra"])
def test_recordings_in_a_folder_that_is_no_digit_are_refused(folder, tmp_path):
    pytest.importorskip("tonic")
    write_bin(tmp_path / "Test" / folder / "00001.bin", **EVENTS)
    with pytest.raises(DataError, match=rf"00001\.bin is in a folder '{folder}'; N-MNIST's folders are the digits 0 to 9"):
        datasets.nmnist_folder(tmp_path, False, 3)


def test_an_archive_that_is_one_array_is_refused(tmp_path):
    np.save(tmp_path / "r.npy", np.zeros(3))
    (tmp_path / "r.npy").rename(tmp_path / "r.npz")
    with pytest.raises(DataError, match=r"r\.npz holds one array \[3\], as \.npy files do"):
        datasets.read_recordings(tmp_path / "r.npz")


def test_a_recording_of_one_instant_keeps_its_events(tmp_path):
    pytest.importorskip("tonic")
    recorded = generated_gestures(40)
    recorded[0][:, 3] = 7
    gesture_folder(tmp_path, recorded)
    source = dvs128.with_tonic(tmp_path, 4, 16, 0)
    rows = [path.endswith("0.npy") for path in source.test.dataset.dataset.paths]
    ((frames, _),) = source.test.load([torch.tensor([rows.index(True)])], [0])
    assert frames[0].sum() == 40
    assert frames.sum() == 40


@pytest.mark.parametrize("label", [-1, 11, 3.7, "a", None])
def test_labels_that_are_no_class_are_refused(label):
    recordings = dvs128.Recordings(
        [({name: np.array([1, 2]) for name in "txy"} | {"p": np.array([0, 1])}, label)], ["r.npz"], None
    )
    with pytest.raises(DataError, match=r"r\.npz has label .*; labels are integers in 0\.\.10"):
        recordings[0]


def spikingjelly_gestures(root, turned=False, **change):
    """DVS128 Gesture as SpikingJelly keeps it, two recordings a part; ``change`` replaces columns of the first."""
    for part in ("train", "test"):
        for label, events in enumerate(generated_gestures(400)[:2]):
            columns = dict(zip("xyp", events.T.astype(np.int64), strict=False), t=np.arange(len(events)) * 10)
            columns |= change if label == 0 else {}
            held = root / "events_np" / part / str(label)
            held.mkdir(parents=True)
            np.savez(held / "user01_lab_0.npz", **{name: v[::-1] if turned else v for name, v in columns.items()})


def test_gestures_that_spikingjelly_keeps_are_checked_and_counted_by_its_own_function(tmp_path):
    datasets_of_host = pytest.importorskip("spikingjelly.datasets")
    spikingjelly_gestures(tmp_path / "good")
    spikingjelly_gestures(tmp_path / "turned", turned=True)
    spikingjelly_gestures(tmp_path / "outside", x=np.full(400, 128))
    spikingjelly_gestures(tmp_path / "no times", t=np.linspace(0, 1, 400))

    def read(folder):
        ((frames, labels),) = dvs128.with_spikingjelly(tmp_path / folder, 4, 128, 0).test.load([torch.arange(2)], [0])
        assert labels.tolist() == [0, 1]
        return frames

    expected = read("good")
    for n in range(2):
        with np.load(tmp_path / "good" / "events_np" / "test" / str(n) / "user01_lab_0.npz") as events:
            frames = datasets_of_host.integrate_events_by_fixed_frames_number(events, "number", 4, 128, 128)
        assert np.array_equal(expected[:, n], frames)
    with pytest.warns(DataWarning, match="not in order of time"):
        found = read("turned")
    assert torch.equal(found, expected)
    with pytest.raises(DataError, match=r"user01_lab_0\.npz: x\[0\] is 128, outside the sensor of 128 x 128"):
        read("outside")
    with pytest.raises(DataError, match=r"user01_lab_0\.npz: t has dtype float64"):
        read("no times")


def test_stored_frames_are_read_again_until_their_recording_changes(tmp_path):
    pytest.importorskip("tonic")
    gesture_folder(tmp_path, recorded := generated_gestures(200))

    def read():
        source = dvs128.with_tonic(tmp_path, 4, 16, 0).test
        ((frames, _),) = source.load([torch.tensor([3])], [0])
        return frames, Path(source.dataset.dataset.paths[3])

    def store(**change):
        with np.load(kept) as stored:
            content = dict(stored)
        np.savez(kept, **content | change)

    expected, recording = read()
    (kept,) = (tmp_path / "frames" / "tonic-test-4-16").iterdir()
    store(frames=expected[:, 0].numpy() + 1)
    assert torch.equal(read()[0], expected + 1), "stored frames are read, not made"
    np.save(recording, recorded[0][:100])
    assert read()[0].sum() == 100, "the recording was changed"
    store(frames=np.zeros((4, 2, 32, 32)))
    with pytest.raises(DataError, match=r"3\.npz holds frames \[4, 2, 32, 32\], not \[4, 2, 16, 16\]; delete it"):
        read()
    kept.write_bytes(b"PK")
    with pytest.raises(DataError, match=r"3\.npz is damaged"):
        read()
    recordings = dvs128.Recordings([None], [str(tmp_path / "gone.npy")], None)
    with pytest.raises(DataError, match=r"gone\.npy does not exist any more"):
        dvs128.Kept(recordings, tmp_path, (4, 2, 16, 16))[0]
