"""How far can an attention head's output move when its tokens move a little? See README.md."""

from . import errors
from .affine import affine_upper_bound, affine_upper_bounds
from .bounds.slack import secant_slack, secant_slack_loss
from .certificate import Certificate
from .certify import METHODS, certify, certify_many
from .head import AttentionHead
from .loaders import from_bert, from_gpt2, from_model, from_multihead_attention, from_vit
from .problem import HeadProblem
from .regions import TokenBall, TokenBox, TokenSubstitutions
from .search import SearchResult, search

__all__ = [
    "METHODS",
    "AttentionHead",
    "Certificate",
    "HeadProblem",
    "SearchResult",
    "TokenBall",
    "TokenBox",
    "TokenSubstitutions",
    "affine_upper_bound",
    "affine_upper_bounds",
    "certify",
    "certify_many",
    "errors",
    "from_bert",
    "from_gpt2",
    "from_model",
    "from_multihead_attention",
    "from_vit",
    "search",
    "secant_slack",
    "secant_slack_loss",
]
