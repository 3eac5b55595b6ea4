"""sj_tac: temporal-aggregation convolution for pretrained SpikingJelly nets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sj_tac import functional as functional
    from sj_tac.batchnorm import freeze_bn, recalibrate
    from sj_tac.capturing import Captured, capture
    from sj_tac.conversion import convert, plan, report, restore, set_k
    from sj_tac.host import register_affine, register_neuron
    from sj_tac.operators import TAC, TACTP
    from sj_tac.policy import Policy, Rule
    from sj_tac.schedule import KSchedule
    from sj_tac.support.memory import keep_memory
    from sj_tac.tuning.diagnosis import Diagnosis, diagnose
    from sj_tac.tuning.evidence import Evidence
    from sj_tac.tuning.matching import Match, match
    from sj_tac.tuning.search import search
    from sj_tac.tuning.sensitivity import Sensitivity, sensitivity
    from sj_tac.verdicts import Reason, Report, Verdict

__version__ = "0.1.0"

__all__ = [
    "TAC",
    "TACTP",
    "Captured",
    "Diagnosis",
    "Evidence",
    "KSchedule",
    "Match",
    "Policy",
    "Reason",
    "Report",
    "Rule",
    "Sensitivity",
    "Verdict",
    "capture",
    "convert",
    "diagnose",
    "freeze_bn",
    "functional",
    "keep_memory",
    "match",
    "plan",
    "recalibrate",
    "register_affine",
    "register_neuron",
    "report",
    "restore",
    "search",
    "sensitivity",
    "set_k",
]

# Where each public name is; loaded when it is first asked for, so that importing sj_tac starts nothing.
_HOMES = {
    "operators": ("TAC", "TACTP"),
    "policy": ("Policy", "Rule"),
    "verdicts": ("Reason", "Report", "Verdict"),
    "batchnorm": ("freeze_bn", "recalibrate"),
    "capturing": ("Captured", "capture"),
    "conversion": ("convert", "plan", "report", "restore", "set_k"),
    "schedule": ("KSchedule",),
    "support.memory": ("keep_memory",),
    "host": ("register_affine", "register_neuron"),
    "tuning.diagnosis": ("Diagnosis", "diagnose"),
    "tuning.sensitivity": ("Sensitivity", "sensitivity"),
    "tuning.evidence": ("Evidence",),
    "tuning.matching": ("Match", "match"),
    "tuning.search": ("search",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = getattr(import_module(f"sj_tac.{_HOME[name]}"), name)
    elif name == "functional":
        found = import_module("sj_tac.functional")
    else:
        raise AttributeError(f"module 'sj_tac' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
