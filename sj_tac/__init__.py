"""sj_tac: temporal-aggregation convolution for pretrained SpikingJelly nets."""

from sj_tac import functional
from sj_tac.operators import TAC, TACTP
from sj_tac.policy import Policy, Rule
from sj_tac.report import Reason, Report, Verdict

# Last: some of these functions share their names with modules, and whichever is bound later is what `sj_tac.report` means.
from sj_tac.conversion import plan, report  # isort: skip
from sj_tac.afterwards import freeze_bn, recalibrate, restore, set_k  # isort: skip
from sj_tac.tuning.diagnosis import Diagnosis, diagnose  # isort: skip
from sj_tac.tuning.sensitivity import Sensitivity, sensitivity  # isort: skip
from sj_tac.tuning.evidence import Evidence  # isort: skip
from sj_tac.tuning.search import search  # isort: skip
from sj_tac.convert import convert  # isort: skip

__version__ = "0.1.0"

__all__ = [
    "TAC",
    "TACTP",
    "Diagnosis",
    "Evidence",
    "Policy",
    "Reason",
    "Report",
    "Rule",
    "Sensitivity",
    "Verdict",
    "convert",
    "diagnose",
    "freeze_bn",
    "functional",
    "plan",
    "recalibrate",
    "report",
    "restore",
    "search",
    "sensitivity",
    "set_k",
]
