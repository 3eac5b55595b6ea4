"""Policy files and patterns that nobody vouches for: a clear error within a second, and what YAML allows still works."""

import time

import pytest
from support import csnn

import sj_tac
from sj_tac import Policy
from sj_tac.errors import PolicyError
from sj_tac.policy import name_matches


def laughs(write):
    """Nine levels, each of which names the one before nine times."""
    levels = [write(i + 1, ", ".join([f"*a{i}"] * 9)) for i in range(9)]
    return "default: &a0 {k: 2}\nrules:\n" + "\n".join(levels)


FILES = {
    "aliases": (laughs(lambda i, names: f"- &a{i} [{names}]"), "more than 10,000 values"),
    "merges": (laughs(lambda i, names: f"- &a{i} {{<<: [{names}]}}"), "more than 10,000 values"),
    "a chain of merges": (
        "rules:\n- &a0 {k: 2}\n" + "".join(f"- &a{i + 1} {{<<: *a{i}}}\n" for i in range(900)),
        "nested deeper than 20",
    ),
    "many keys": ("{" + ", ".join(f"k{i}: 1" for i in range(20_000)) + "}", "more than 10,000 values"),
    "unknown keys": ("{" + ", ".join(f"k{i}: 1" for i in range(2_000)) + "}", "and 1990 more"),
    "many anchors": ("[" + ", ".join(f"&b{i} 1" for i in range(20_000)) + "]", "more than 10,000 values"),
    "lists": ("[" * 500 + "]" * 500, "nested deeper than 20"),
    "maps": ("{a: " * 500 + "1" + "}" * 500, "nested deeper than 20"),
    "blocks": ("\n".join(" " * i + "a:" for i in range(300)), "nested deeper than 20"),
    "itself": ("rules: &a [*a]", "refers to itself"),
    "itself merged": ("default: &a {<<: *a}", "refers to itself"),
    "large": ("# " + "x" * 300_000, "larger than 256 kB"),
    "k": (f"default: {{k: {10**23}}}", "k is 100000000000000000000000"),
    "digits of k": ("default: {k: " + "9" * 5_000 + "}", "a value cannot be read"),
    "hexadecimal k": ("default: {k: 0x" + "f" * 50_000 + "}", "cannot be written out"),
    "a date": ("default: {k: 2001-99-99}", "month must be in"),
    "a key twice": ("default: {k: 2, k: 3}", "'k' stands twice"),
    "a list as key": ("? [a, b]\n: 1", "no plain word"),
    "merges a number": ("default: {<<: 3}", "only mappings can be"),
    "merges a list of numbers": ("default: {<<: [{k: 2}, 3]}", "a scalar is merged in line 1"),
    "an object": ("!!python/object/apply:os.system ['true']", "no tags that build Python objects"),
    "not UTF-8": (b"default: {mode: \xff}", "no text in UTF-8"),
    "zero bytes": ("default: {mode: a\0}", "no YAML"),
    "two documents": ("version: 1\n---\nversion: 1", "no YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_hostile_files_are_a_clear_error_within_a_second(name, tmp_path):
    content, words = FILES[name]
    path = tmp_path / "p.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    begun = time.process_time()
    with pytest.raises(PolicyError, match=words) as raised:
        Policy.load(path)
    assert time.process_time() - begun < 1
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 3_000


PATTERNS = {
    "alternatives": ("re:" + "(a|a)*" * 20, "takes too long"),
    "counts": ("re:" + "(?:a{1,2}|a)*" * 9, "takes too long"),
    "copies": ("re:((a{1000}){1000}){1000}", "more than 1000 times"),
    "huge counts": ("re:a{99999999999999999999}", "more than 1000 times"),
    "length": ("re:" + "a?" * 300, "at most 500 characters"),
    "no expression": ("re:(", "no regular expression"),
    "unknown property": (r"re:\p{nope}", "no regular expression"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_hostile_patterns_are_a_clear_error_within_a_second(name):
    pattern, words = PATTERNS[name]
    names = ["a" * 60 + "b" * i for i in range(1, 300)]
    begun = time.process_time()
    with pytest.raises(PolicyError, match=words) as raised:
        Policy.from_dict({"rules": [{"match": pattern}]}).resolve(names)
    assert time.process_time() - begun < 1
    assert "rules[0]" in str(raised.value)


def test_the_notes_expression_ends_in_time_either_way():
    begun = time.process_time()
    assert name_matches("a" * 60, "re:(a+)+$")
    assert not name_matches("a" * 60 + "b", "re:(a+)+$")
    assert time.process_time() - begun < 1


def test_set_k_refuses_a_pattern_that_takes_too_long_and_changes_nothing():
    fast = sj_tac.convert(csnn(), "preserve", 2)
    before = [v.k for v in sj_tac.report(fast).verdicts]
    for pattern, words in (("re:(", "no regular expression"), ("re:((a{1000}){1000})", "more than 1000 times")):
        with pytest.raises(PolicyError, match=words):
            sj_tac.set_k(fast, 4, pattern)
    with pytest.raises(PolicyError, match="65,536 at most"):
        sj_tac.set_k(fast, 10**23)
    assert [v.k for v in sj_tac.report(fast).verdicts] == before


def test_what_yaml_allows_works(tmp_path):
    """Anchors and merges; a key of one's own overrules a merged one, and an earlier merge a later one."""
    path = tmp_path / "p.yaml"
    path.write_text(
        "default: &d {mode: preserve, k: 4, weights: uniform}\n"
        "rules:\n"
        "  - &one {<<: *d, match: a, k: 8, weights: decay}\n"
        "  - {match: b, <<: [*d, *one]}\n"
        "  - <<: *one\n"
        "    match: re:c.*\n"
    )
    assert Policy.load(path) == Policy.from_dict(
        {
            "default": {"mode": "preserve", "k": 4, "weights": "uniform"},
            "rules": [
                {"match": "a", "mode": "preserve", "k": 8, "weights": "decay"},
                {"match": "b", "mode": "preserve", "k": 4, "weights": "uniform"},
                {"match": "re:c.*", "mode": "preserve", "k": 8, "weights": "decay"},
            ],
        }
    )
    path.write_text("\ufeffdefault: {k: 65536}")  # as some editors begin a file
    assert Policy.load(path).default.k == 65_536
    path.write_text("rules: [" + ", ".join(f"{{match: layer{i}.conv, k: {i + 1}}}" for i in range(500)) + "]")
    begun = time.process_time()
    names = [f"layer{i}.conv" for i in range(500)]
    assert [s.k for s, _ in Policy.load(path).resolve(names).values()] == list(range(1, 501))
    assert time.process_time() - begun < 3


def test_expressions_may_look_ahead_and_behind():
    policy = Policy.from_dict(
        {"default": {"mode": "keep"}, "rules": [{"match": r"re:(?!features\.0$).*", "mode": "preserve"}]}
    )
    found = policy.resolve(["features.0", "features.4", "features.01"])
    assert [s.mode for s, _ in found.values()] == ["keep", "preserve", "preserve"]
