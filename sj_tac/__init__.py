"""sj_tac: temporal-aggregation convolution for pretrained SpikingJelly nets."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sj_tac import functional as functional
    from sj_tac.batchnorm import freeze_bn, recalibrate
    from sj_tac.capturing import Captured, capture
    from sj_tac.conversion import convert, plan, policy_of, report, restore, set_k
    from sj_tac.exporting import Exported, export_onnx
    from sj_tac.host import register_affine, register_neuron, register_surrogate
    from sj_tac.operators import TAC, TACTP
    from sj_tac.policy import Policy, Rule
    from sj_tac.saving import load, save
    from sj_tac.schedule import KSchedule
    from sj_tac.support.memory import keep_memory
    from sj_tac.tuning.bench import Bench, bench
    from sj_tac.tuning.diagnosis import Diagnosis, diagnose
    from sj_tac.tuning.evidence import Evidence
    from sj_tac.tuning.matching import Match, match
    from sj_tac.tuning.search import search
    from sj_tac.tuning.sensitivity import Sensitivity, sensitivity
    from sj_tac.verdicts import Reason, Report, Verdict

__version__ = "0.2.0"

__all__ = [
    "TAC",
    "TACTP",
    "Bench",
    "Captured",
    "Diagnosis",
    "Evidence",
    "Exported",
    "KSchedule",
    "Match",
    "Policy",
    "Reason",
    "Report",
    "Rule",
    "Sensitivity",
    "Verdict",
    "bench",
    "capture",
    "convert",
    "diagnose",
    "export_onnx",
    "freeze_bn",
    "functional",
    "keep_memory",
    "load",
    "match",
    "plan",
    "policy_of",
    "recalibrate",
    "register_affine",
    "register_neuron",
    "register_surrogate",
    "report",
    "restore",
    "save",
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
    "exporting": ("Exported", "export_onnx"),
    "conversion": ("convert", "plan", "policy_of", "report", "restore", "set_k"),
    "saving": ("load", "save"),
    "schedule": ("KSchedule",),
    "support.memory": ("keep_memory",),
    "host": ("register_affine", "register_neuron", "register_surrogate"),
    "tuning.bench": ("Bench", "bench"),
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
    elif name in ("errors", "functional"):
        found = import_module(f"sj_tac.{name}")
    else:
        raise AttributeError(f"module 'sj_tac' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
