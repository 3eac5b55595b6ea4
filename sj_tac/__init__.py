"""sj_tac: temporal-aggregation convolution for pretrained SpikingJelly nets."""

from sj_tac import functional
from sj_tac.operators import TAC, TACTP
from sj_tac.policy import Policy, Rule
from sj_tac.report import Reason, Report, Verdict

# Last: these functions share their names with modules, and whichever is bound later is what `sj_tac.report` means.
from sj_tac.convert import convert, freeze_bn, plan, report, restore, set_k  # isort: skip

__version__ = "0.1.0"

__all__ = [
    "TAC",
    "TACTP",
    "Policy",
    "Reason",
    "Report",
    "Rule",
    "Verdict",
    "convert",
    "freeze_bn",
    "functional",
    "plan",
    "report",
    "restore",
    "set_k",
]
