"""What to do with which layer: the policy file, its checks and how a policy meets a model's layers.

version: 1
layers: [conv]               # or [conv, linear]
default: {mode: preserve, k: 2}
rules:                       # first match wins; what a rule leaves out comes from default
  - {match: conv_fc.0, mode: keep}
  - {match: "layer4.*", mode: collapse, k: 4, spikes: count}
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sj_tac.errors import PolicyError
from sj_tac.support import patterns
from sj_tac.support.files import write_text
from sj_tac.support.plain_yaml import PlainDataError, read_plain
from sj_tac.support.words import nearest as nearest

Mode = Literal["preserve", "collapse", "keep"]
# More steps than any recording is divided into; a larger k is a slip, and would ask for as many weights.
MOST = 65_536
Dtype = Literal["source", "bfloat16", "float16", "int8"]
# The dtype that the source net has.
SOURCE: Dtype = "source"
K = Annotated[int, Field(strict=True, ge=1, le=MOST, description="source steps that share one convolution")]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _exact_is_of_the_past(cls, values: Any) -> Any:
        """Older files may have the key; what is alike for all frames runs once wherever a call is captured."""
        if not isinstance(values, dict) or "exact" not in values:
            return values
        if values["exact"] is False:
            warnings.warn("policy: the key exact has no effect any more; drop it", FutureWarning, stacklevel=2)
        return {key: value for key, value in values.items() if key != "exact"}


class Settings(_Keys):
    """What happens to one layer."""

    mode: Mode = Field("preserve", description="preserve: T stays; collapse: one frame for k; keep: leave alone")
    k: K = 2
    weights: Literal["decay", "uniform", "mixed", "learned"] = Field(
        "decay", description="of the frames of a group; mixed: uniform for spikes of neurons with shared drives, else decay"
    )
    normalize: bool = Field(True, strict=True, description="weights sum to 1; false is the paper's form")
    spikes: Literal["count", "binary"] = Field("count", description="of a collapse: mean of k steps, or one step")
    emit: Literal["frames", "groups"] = Field("frames", description="of a collapse up to the output: T, or T/k frames")
    approximate: bool = Field(
        False, strict=True, description="convert also where a MaxPool or an activation stands before the neuron"
    )
    dtype: Dtype = Field("source", description="that the convolution computes in; neurons and norms stay in the net's own")

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


class Rule(_Keys):
    """Settings for the convs whose qualified name matches; what it leaves out comes from the policy's default."""

    match: str = Field(
        min_length=1,
        max_length=patterns.LENGTH,
        description='the conv\'s qualified name: exact, a glob, or "re:..." (full match)',
    )
    mode: Mode | None = None
    k: K | None = None
    weights: Literal["decay", "uniform", "mixed", "learned"] | None = None
    normalize: Annotated[bool, Field(strict=True)] | None = None
    spikes: Literal["count", "binary"] | None = None
    emit: Literal["frames", "groups"] | None = None
    approximate: Annotated[bool, Field(strict=True)] | None = None
    dtype: Dtype | None = None

    @field_validator("match")
    @classmethod
    def _is_a_pattern(cls, match: str) -> str:
        wrong = patterns.problem(match)
        if wrong:
            raise ValueError(wrong)
        return match

    @property
    def is_exact(self) -> bool:
        """True where the rule names one layer, rather than a pattern."""
        return not self.match.startswith("re:") and not any(c in self.match for c in "*?[")

    def matches(self, name: str) -> bool:
        """Whether this rule is for the layer of that name, if no rule before it is."""
        return name_matches(name, self.match)


def name_matches(name: str, pattern: str) -> bool:
    """A qualified name against an exact name, a glob ("layer4.*") or a regular expression ("re:..."). Raises PolicyError."""
    return patterns.Matcher()(name, pattern)


def exactly(name: str) -> str:
    """The pattern that matches this name alone."""
    special = name.startswith("re:") or any(c in name for c in "*?[")
    return f"re:{re.escape(name)}" if special else name


class Policy(BaseModel):
    """A versioned list of rules over a default. Immutable; ``load``, ``save``, ``from_dict``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    """Of the format."""

    layers: tuple[Literal["conv", "linear"], ...] = Field(
        ("conv",), min_length=1, description="which layers are converted: convolutions of any dimension, Linear layers"
    )
    """Which layers are converted: "conv", of any dimension, and "linear", the Linear layers before neurons."""

    default: Settings = Settings()
    """Settings of what no rule matches."""

    rules: tuple[Rule, ...] = ()
    """The first that matches a layer's name wins; what it leaves out comes from the default."""

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
        """A policy from plain data; ``source`` is what errors call it.

        Raises:
            PolicyError: a key or value that a policy has not. The message names the rule and what would fit.
        """
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
        """Read a YAML (or JSON) file.

        Raises:
            PolicyError: missing, empty, no YAML, other content than plain data, more than 256 kB, 10,000 values or 20
                levels.
        """
        file = Path(path)
        try:
            values = read_plain(file)
        except OSError as error:
            raise PolicyError(f"policy file {str(file)!r} cannot be read: {error}") from None
        except PlainDataError as error:
            raise PolicyError(f"{file}{error}") from None
        if values is None:
            raise PolicyError(f"{file} is empty; the least policy is 'default: {{mode: preserve, k: 2}}'")
        return cls.from_dict(values, str(file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy as YAML, all or nothing: a file that exists is replaced only once the new one is complete.

        Raises:
            WriteError: the system could not write it.
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

    def _matching(self, index: int, names: Sequence[str], matches: patterns.Matcher) -> list[str]:
        try:
            return [name for name in names if matches(name, self.rules[index].match)]
        except PolicyError as error:
            raise PolicyError(f"{self._where(index)}: {error}") from None

    def resolve(self, names: Sequence[str]) -> dict[str, tuple[Settings, Rule | None]]:
        """Settings of every layer, with the rule they come from (None: the default).

        Raises:
            PolicyError: a rule matches no name, or only names that earlier rules took, or takes too long to match.
        """
        found: dict[str, tuple[Settings, Rule | None]] = {}
        matches = patterns.Matcher()
        for i, rule in enumerate(self.rules):
            matching = self._matching(i, names, matches)
            if not matching:
                raise PolicyError(f"{self._where(i)} matches no conv of the model; {nearest(rule.match, names)}")
            fresh = [name for name in matching if name not in found]
            if not fresh:
                earlier = next(j for j, r in enumerate(self.rules) if matches(matching[0], r.match))
                raise PolicyError(
                    f"{self._where(i)} is never reached: rules[{earlier}] (match: {self.rules[earlier].match}) takes "
                    f"{matching} before it, and the first match wins; put the narrower rule first"
                )
            found |= {name: (self._settings(rule), rule) for name in fresh}
        return {name: found.get(name, (self.default, None)) for name in names}


def as_policy(policy: object, k: object = 2) -> Policy:  # noqa: C901  (one check after the other)
    """The policy that ``convert`` was given: a mode ("preserve", "preserve:4:int8"), a dict, a Policy or a path.

    ``k`` is the default's where it sets none.

    Raises:
        PolicyError: ``k`` is no int from 1 to 65,536, the name or file is unknown, or ``k`` is given twice.
    """
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST:
        raise PolicyError(
            f"k={_shown(k)} must be an int of at least 1 (the number of frames that share one convolution), {MOST:,} at most"
        )
    if isinstance(policy, str) and policy.partition(":")[0] in ("preserve", "collapse", "keep") and ":" in policy:
        return Policy(default=_said_in_short(policy, k))
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


def with_dtype(policy: object, k: object, dtype: object) -> Policy:
    """``as_policy``, with a default that says ``dtype``: what ``convert`` was given beside it.

    Raises:
        PolicyError: as ``as_policy``; another dtype than float32 (the source's), int8, bfloat16 or float16; the policy says
            another one, or is "exact".
    """
    known: dict[Any, Dtype] = {
        torch.float32: SOURCE, torch.int8: "int8", torch.bfloat16: "bfloat16", torch.float16: "float16",
    }  # fmt: skip
    if not isinstance(dtype, torch.dtype) or dtype not in known:
        raise PolicyError(
            f"dtype={_shown(dtype)} is none that convolutions are given; torch.int8, torch.bfloat16 and torch.float16 are"
        )
    if isinstance(policy, str) and policy == "exact" and known[dtype] != SOURCE:
        raise PolicyError(f'policy="exact" gives the source\'s spikes, which dtype={dtype} does not; drop one of the two')
    read = as_policy(policy, k)
    if read.default.dtype not in (SOURCE, known[dtype]):
        said = read.default.dtype
        raise PolicyError(f"dtype={dtype} is given beside a policy whose default says dtype: {said}; drop one of the two")
    changed = read.model_copy(update={"default": read.default.model_copy(update={"dtype": known[dtype]})})
    changed._source = read._source
    return changed


def _said_in_short(text: str, k: int) -> Settings:
    """What "preserve:4" or "preserve:4:int8" says. Raises PolicyError."""
    mode, said, *rest = text.split(":")
    dtype, more = (rest or [SOURCE])[0], rest[1:]
    is_k = said.isascii() and said.isdigit() and len(said) < 9 and 1 <= int(said) <= MOST
    if not is_k or mode == "keep" or more or dtype not in get_args(Dtype):
        form = f"write the k after a colon, as in preserve:4 or collapse:8, 1 to {MOST:,}"
        raise PolicyError(f"policy={_shown(text)}: {form}, and behind another the dtype, as in preserve:4:int8")
    if k not in (2, int(said)):
        raise PolicyError(f"k={k} is given beside policy={text!r}; drop one of the two")
    return Settings.build(mode=mode, k=int(said), dtype=dtype)


def _shown(value: Any) -> str:
    """A value in an error, which may itself be what is wrong: too long, or a number of more digits than Python writes."""
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _explain(error: ValidationError, source: str, model: type[BaseModel]) -> str:
    """pydantic's findings in one line each: where in the file, what, and the nearest name that exists."""
    lines = []
    found = error.errors(include_url=False)
    for item in found[:10]:
        parts = [str(p) for p in item["loc"]]
        where = re.sub(r"\.(\d+)", r"[\1]", ".".join(parts)) or "value"
        if item["type"] == "extra_forbidden":
            owner: type[BaseModel] = Rule if "rules" in parts else Settings if "default" in parts else model
            lines.append(f"{source}: unknown key {_shown(where)}; {nearest(parts[-1][:100], owner.model_fields)}")
        elif item["type"] == "literal_error":
            allowed = re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", "")))
            shown = _shown(item["input"])
            hint = nearest(shown.strip("'"), allowed) if allowed else item["msg"]
            lines.append(f"{source}: {where} is {shown}; {hint}")
        else:
            lines.append(f"{source}: {where} is {_shown(item['input'])}; {item['msg'].removeprefix('Value error, ')}")
    if len(found) > len(lines):
        lines.append(f"{source}: and {len(found) - len(lines)} more")
    return "\n".join(lines)
