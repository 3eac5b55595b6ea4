"""What to do with which layer: the policy file, its checks and how a policy meets a model's layers.

version: 1
layers: [conv]               # or [conv, linear]
default: {mode: preserve, k: 2}
rules:                       # first match wins; what a rule leaves out comes from default
  - {match: conv_fc.0, mode: keep}
  - {match: "layer4.*", mode: collapse, k: 4, spikes: count}
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sj_tac.errors import PolicyError
from sj_tac.support.files import write_text

Mode = Literal["preserve", "collapse", "keep"]
K = Annotated[int, Field(strict=True, ge=1, description="source steps that share one convolution")]


class Settings(BaseModel):
    """What happens to one layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = Field("preserve", description="preserve: T stays; collapse: one frame for k; keep: leave alone")
    k: K = 2
    weights: Literal["decay", "uniform", "mixed", "learned"] = Field(
        "decay", description="of the frames of a group; mixed: uniform for spikes of neurons with shared drives, else decay"
    )
    normalize: bool = Field(True, strict=True, description="weights sum to 1; false is the paper's form")
    spikes: Literal["count", "binary"] = Field("count", description="of a collapse: mean of k steps, or one step")
    emit: Literal["frames", "groups"] = Field("frames", description="of a collapse up to the output: T, or T/k frames")
    approximate: bool = Field(False, strict=True, description="convert also where a MaxPool stands before the neuron")
    exact: bool = Field(True, strict=True, description="what is alike for all frames (a repeated image) is computed once")

    @model_validator(mode="after")
    def _learned_weights_are_normalized(self) -> Settings:
        if self.weights == "learned" and not self.normalize:
            raise ValueError("weights: learned are a softmax and always sum to 1; drop normalize: false")
        return self

    @classmethod
    def build(cls, **values: Any) -> Settings:
        """Settings from keyword arguments. Raises PolicyError, in words, instead of pydantic's ValidationError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise PolicyError(_explain(error, "settings", cls)) from None


class Rule(BaseModel):
    """Settings for the convs whose qualified name matches; what it leaves out comes from the policy's default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str = Field(min_length=1, description='the conv\'s qualified name: exact, a glob, or "re:..." (full match)')
    mode: Mode | None = None
    k: K | None = None
    weights: Literal["decay", "uniform", "mixed", "learned"] | None = None
    normalize: Annotated[bool, Field(strict=True)] | None = None
    spikes: Literal["count", "binary"] | None = None
    emit: Literal["frames", "groups"] | None = None
    approximate: Annotated[bool, Field(strict=True)] | None = None
    exact: Annotated[bool, Field(strict=True)] | None = None

    @field_validator("match")
    @classmethod
    def _regex_compiles(cls, match: str) -> str:
        if match.startswith("re:"):
            try:
                re.compile(match[3:])
            except re.error as error:
                raise ValueError(f"{match!r} is no regular expression: {error}") from None
        return match

    @property
    def is_exact(self) -> bool:
        """True where the rule names one layer, rather than a pattern."""
        return not self.match.startswith("re:") and not any(c in self.match for c in "*?[")

    def matches(self, name: str) -> bool:
        return name_matches(name, self.match)


def name_matches(name: str, pattern: str) -> bool:
    """A qualified name against an exact name, a glob ("layer4.*") or a regular expression ("re:...")."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def nearest(name: str, known: Iterable[str]) -> str:
    """ "did you mean ...?", or the first names there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"there are: {', '.join(map(repr, names[:8]))}{' ...' if len(names) > 8 else ''}"


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, but for keys that stand twice, of which it would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for (key, _), value in zip(node.value, keys, strict=True):
            if keys.count(value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {value!r} stands twice", key.start_mark)
        return super().construct_mapping(node, deep)


class Policy(BaseModel):
    """A versioned list of rules over a default. Immutable; ``load``, ``save``, ``from_dict``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    layers: tuple[Literal["conv", "linear"], ...] = Field(
        ("conv",), min_length=1, description="which layers are converted: convolutions of any dimension, Linear layers"
    )
    default: Settings = Settings()
    rules: tuple[Rule, ...] = ()

    # Where it was read from, for errors; two policies that say the same are equal wherever they come from.
    _source: str = "policy"
    _evidence: Any = None

    @property
    def evidence(self) -> Any:
        """What ``sj_tac.search`` measured to find this policy, an ``sj_tac.Evidence``; None of any other policy."""
        return self._evidence

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.model_dump() == other.model_dump()

    @classmethod
    def from_dict(cls, values: Any, source: str = "policy") -> Policy:
        """A policy from plain data; ``source`` is what errors call it. Raises PolicyError."""
        if not isinstance(values, dict):
            raise PolicyError(f"{source}: a policy is a mapping with default and rules, got {type(values).__name__}")
        try:
            policy = cls.model_validate(values)
        except ValidationError as error:
            raise PolicyError(_explain(error, source, cls)) from None
        policy._source = source
        for i, rule in enumerate(policy.rules):
            try:
                policy._settings(rule)
            except ValidationError as error:
                raise PolicyError(f"{policy._where(i)}: {_explain(error, 'with the default', Settings)}") from None
        return policy

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Read a YAML (or JSON) file. Raises PolicyError: missing, empty, no YAML, other content than plain data."""
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"policy file {str(file)!r} cannot be read: {error}") from None
        try:
            values = yaml.load(text, _StrictLoader)
        except yaml.constructor.ConstructorError as error:
            raise PolicyError(
                f"{file}: {error.problem} (line {error.problem_mark.line + 1 if error.problem_mark else '?'}); "
                "a policy is plain data: no tags that build Python objects, every key once"
            ) from None
        except yaml.YAMLError as error:
            raise PolicyError(f"{file} is no YAML: {error}") from None
        if values is None:
            raise PolicyError(f"{file} is empty; the least policy is 'default: {{mode: preserve, k: 2}}'")
        return cls.from_dict(values, str(file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as YAML, all or nothing: a file that exists is replaced only once the new one is complete.

        Raises WriteError.
        """
        write_text(path, yaml.safe_dump(self.to_dict(), sort_keys=False))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``from_dict`` reads back; only what was set."""
        values = self.model_dump(exclude_unset=True, mode="json")
        return {"version": self.version, "default": self.default.model_dump(mode="json", exclude_unset=True)} | values

    @classmethod
    def json_schema(cls) -> str:
        """The JSON schema of a policy file, for editors and validators."""
        return json.dumps(cls.model_json_schema(), indent=2)

    def _settings(self, rule: Rule) -> Settings:
        own = rule.model_dump(exclude={"match"}, exclude_none=True)
        return Settings.model_validate(self.default.model_dump() | own)

    def _where(self, index: int) -> str:
        return f"{self._source}, rules[{index}] (match: {self.rules[index].match})"

    def resolve(self, names: Sequence[str]) -> dict[str, tuple[Settings, Rule | None]]:
        """Settings of every layer, with the rule they come from (None: the default).

        Raises:
            PolicyError: a rule matches no name, or only names that earlier rules took.
        """
        found: dict[str, tuple[Settings, Rule | None]] = {}
        for i, rule in enumerate(self.rules):
            matching = [name for name in names if rule.matches(name)]
            if not matching:
                raise PolicyError(f"{self._where(i)} matches no conv of the model; {nearest(rule.match, names)}")
            fresh = [name for name in matching if name not in found]
            if not fresh:
                earlier = next(j for j, r in enumerate(self.rules) if r.matches(matching[0]))
                raise PolicyError(
                    f"{self._where(i)} is never reached: rules[{earlier}] (match: {self.rules[earlier].match}) takes "
                    f"{matching} before it, and the first match wins; put the narrower rule first"
                )
            found |= {name: (self._settings(rule), rule) for name in fresh}
        return {name: found.get(name, (self.default, None)) for name in names}


def as_policy(policy: object, k: object = 2) -> Policy:  # noqa: C901  (one check after the other)
    """The policy that ``convert`` was given: a mode, a dict, a Policy or a path. ``k`` is the default's where it sets none.

    Raises:
        PolicyError: ``k`` is no int of at least 1, the name or file is unknown, or ``k`` is given twice.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise PolicyError(f"k={k!r} must be an int of at least 1 (the number of frames that share one convolution)")
    if policy == "exact":
        if k not in (1, 2):
            raise PolicyError(f'policy="exact" aggregates nothing, so that k={k} has no meaning there; drop it')
        return Policy(default=Settings.build(mode="preserve", k=1))
    if isinstance(policy, str) and policy in ("preserve", "collapse", "keep"):
        return Policy(default=Settings.build(mode=policy, k=k))
    if policy == "auto":
        raise PolicyError(
            'policy="auto" is measured: sj_tac.convert(model, "auto", calibration=batches), or sj_tac.search(model, batches)'
        )
    if isinstance(policy, str) and not (Path(policy).suffix or os.sep in policy or Path(policy).exists()):
        raise PolicyError(
            f"policy={policy!r} is neither a mode nor a file; {nearest(policy, ['preserve', 'collapse', 'keep', 'exact'])}"
        )
    if isinstance(policy, Policy):
        read = policy
    elif isinstance(policy, (str, os.PathLike)):
        read = Policy.load(policy)
    else:
        read = Policy.from_dict(policy)
    if "k" in read.default.model_fields_set:
        if k not in (2, read.default.k):
            raise PolicyError(f"k={k} is given beside a policy whose default says k: {read.default.k}; drop one of the two")
        return read
    changed = read.model_copy(update={"default": read.default.model_copy(update={"k": k})})
    changed._source = read._source
    return changed


def _explain(error: ValidationError, source: str, model: type[BaseModel]) -> str:
    """pydantic's findings in one line each: where in the file, what, and the nearest name that exists."""
    lines = []
    for item in error.errors():
        parts = [str(p) for p in item["loc"]]
        where = re.sub(r"\.(\d+)", r"[\1]", ".".join(parts)) or "value"
        if item["type"] == "extra_forbidden":
            owner: type[BaseModel] = Rule if "rules" in parts else Settings if "default" in parts else model
            lines.append(f"{source}: unknown key {where!r}; {nearest(parts[-1], owner.model_fields)}")
        elif item["type"] == "literal_error":
            allowed = re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", "")))
            hint = nearest(str(item["input"]), allowed) if allowed else item["msg"]
            lines.append(f"{source}: {where} is {item['input']!r}; {hint}")
        else:
            lines.append(f"{source}: {where} is {item['input']!r}; {item['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
