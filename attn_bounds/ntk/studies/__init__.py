"""The studies behind the command line and the report: each turns data and settings into tables and figures."""

from attn_bounds.ntk.studies._base import ATTENTION, BASELINE, Study, kernels
from attn_bounds.ntk.studies._convergence import convergence_study
from attn_bounds.ntk.studies._defend import defence_study
from attn_bounds.ntk.studies._errors import error_study
from attn_bounds.ntk.studies._influence import influence_study
from attn_bounds.ntk.studies._malleability import malleability_study
from attn_bounds.ntk.studies._poison import poison_study
from attn_bounds.ntk.studies._softmax import softmax_study
from attn_bounds.ntk.studies._spectrum import spectrum_study

__all__ = [
    "ATTENTION",
    "BASELINE",
    "Study",
    "convergence_study",
    "defence_study",
    "error_study",
    "influence_study",
    "kernels",
    "malleability_study",
    "poison_study",
    "softmax_study",
    "spectrum_study",
]
