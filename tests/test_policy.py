"""Policies: rules meet names, files round-trip, nothing is half-written, the schema is the one that is shipped."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st
from support import csnn

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
    assert not list(path.parent.glob("*.tmp"))


def test_saving_leaves_the_old_file_where_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "p.yaml"
    Policy().save(path)
    before = path.read_text()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Policy.from_dict({"default": {"k": 8}}).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.yaml"]


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
