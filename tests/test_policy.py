"""Policies: rules meet names, files round-trip, the schema is the one that is shipped; files that nobody vouches for."""

import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st
from support import csnn
from torch import nn

import sj_tac
from sj_tac import Policy, Rule
from sj_tac.errors import PolicyError
from sj_tac.policy import Settings, name_matches

ROOT = Path(__file__).resolve().parents[1]


def test_first_match_wins_and_rules_inherit_from_the_default():
    policy = Policy.from_dict(
        {
            "default": {"mode": "collapse", "k": 4, "spikes": "binary"},
            "rules": [{"match": "a.0", "mode": "keep"}, {"match": "a.*", "k": 8}, {"match": r"re:b\d", "mode": "preserve"}],
        }
    )
    resolved = {name: s for name, (s, _) in policy.resolve(["a.0", "a.1", "b2", "c"]).items()}
    assert resolved["a.0"].mode == "keep"
    assert (resolved["a.1"].mode, resolved["a.1"].k, resolved["a.1"].spikes) == ("collapse", 8, "binary")
    assert (resolved["b2"].mode, resolved["b2"].k) == ("preserve", 4)
    assert resolved["c"] == policy.default


@pytest.mark.parametrize(
    ("name", "pattern", "matches"),
    [
        ("layer4.0.conv1", "layer4.*", True),
        ("layer4.0.conv1", "layer4", False),
        ("layer4.0.conv1", "re:layer[34].*conv1", True),
        ("layer4.0.conv1", "re:layer4", False),
        ("features.10", "features.?", False),
        ("features.1", "features.[12]", True),
        ("a[0]", "a[0]", True),
        ("features.01", r"re:(?!features\.0$).*", True),
        ("features.0", r"re:(?!features\.0$).*", False),
    ],
)
def test_patterns(name, pattern, matches):
    assert name_matches(name, pattern) is matches


@given(
    st.lists(
        st.fixed_dictionaries(
            {"match": st.sampled_from(["0", "4", "8", "*", "re:[048]"])},
            optional={
                "mode": st.sampled_from(["preserve", "collapse", "keep"]),
                "k": st.integers(1, 64),
                "spikes": st.sampled_from(["count", "binary"]),
                "emit": st.sampled_from(["frames", "groups"]),
            },
        ),
        max_size=4,
    ),
    st.integers(1, 9),
)
def test_saved_policies_read_back_the_same(tmp_path_factory, rules, k):
    path = tmp_path_factory.mktemp("policies") / "p.yaml"
    policy = Policy.from_dict({"default": {"k": k}, "rules": rules})
    policy.save(path)
    again = Policy.load(path)
    assert again == policy
    assert again.to_dict() == policy.to_dict()


def test_a_policy_object_a_dict_and_a_file_do_the_same(tmp_path):
    net = csnn()
    values = {"default": {"mode": "preserve", "k": 4}, "rules": [{"match": "4", "mode": "keep"}]}
    policy = Policy(default=Settings(k=4), rules=(Rule(match="4", mode="keep"),))
    policy.save(tmp_path / "p.yaml")
    reports = [sj_tac.plan(net, p).to_dict() for p in (values, policy, tmp_path / "p.yaml", str(tmp_path / "p.yaml"))]
    assert all(report == reports[0] for report in reports)
    assert [v["status"] for v in reports[0]["verdicts"]] == ["converted", "kept", "converted"]


def test_a_rule_may_not_be_changed_behind_the_checks():
    with pytest.raises(ValueError, match="frozen"):
        Policy().default.k = 0
    with pytest.raises(PolicyError, match="k is 0"):
        Settings.build(k=0)


def test_the_shipped_schema_and_policies_are_the_codes():
    schema = json.loads((ROOT / "docs" / "policy.schema.json").read_text())
    assert schema == json.loads(Policy.json_schema())
    files = sorted((ROOT / "examples" / "policies").glob("*.yaml"))
    assert files
    for file in files:
        assert Policy.load(file).to_dict()["version"] == yaml.safe_load(file.read_text())["version"]


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
    "lists": ("[" * 21 + "]" * 21, "nested deeper than 20"),
    "maps": ("{a: " * 500 + "1" + "}" * 500, "nested deeper than 20"),
    "itself": ("rules: &a [*a]", "refers to itself"),
    "itself merged": ("default: &a {<<: *a}", "refers to itself"),
    "large": ("# " + "x" * 300_000, "larger than 256 kB"),
    "k": (f"default: {{k: {10**23}}}", "k is 100000000000000000000000"),
    "digits of k": ("default: {k: " + "9" * 5_000 + "}", "a value cannot be read"),
    "hexadecimal k": ("default: {k: 0x" + "f" * 50_000 + "}", "cannot be written out"),
    "a date": ("default: {k: 2001-99-99}", "month must be in"),
    "a key twice": ("default: {k: 2, k: 3}", r"'k' stands twice \(line 1\)"),
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


def test_twenty_levels_are_read(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("[" * 20 + "]" * 20)
    with pytest.raises(PolicyError, match="mapping") as raised:
        Policy.load(path)
    assert "nested" not in str(raised.value)


PATTERNS = {
    "alternatives": ("re:" + "(a|a)*" * 20, "takes too long"),
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


def test_the_key_exact_of_older_files_is_dropped_and_said_where_it_asked_for_something():
    older = {"default": {"exact": True}, "rules": [{"match": "0", "exact": True, "k": 4}]}
    assert Policy.from_dict(older) == Policy(rules=(Rule(match="0", k=4),))
    with pytest.warns(FutureWarning, match="exact has no effect any more"):
        assert Policy.from_dict({"default": {"exact": False}}) == Policy()


def test_register_affine_says_that_it_is_not_needed():
    with pytest.warns(FutureWarning, match="convert measures what is affine"):
        assert sj_tac.register_affine(nn.ReLU) is nn.ReLU
