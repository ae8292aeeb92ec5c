"""Is an attention model in a regime where kernel theory and influence functions can be trusted? See ntk/README.md."""

from attn_bounds.ntk.attention import LinearizedAttention
from attn_bounds.ntk.data import Dataset, Split, from_arrays, load_data
from attn_bounds.ntk.dynamics import (
    ConvergenceSettings,
    convergence,
    gradient_flow_prediction,
    kernel_alignment,
    kernel_distance,
)
from attn_bounds.ntk.empirical import empirical_ntk
from attn_bounds.ntk.influence import KernelInfluence, ModelInfluence, top_k
from attn_bounds.ntk.kernels import AttendedKernel, GramKernel, InfiniteReLU, two_layer_ntk
from attn_bounds.ntk.malleability import Attack, flip_rate, malleability, rank_correlation
from attn_bounds.ntk.networks import TwoLayerReLU, train_network
from attn_bounds.ntk.ridge import Ridge
from attn_bounds.ntk.spectrum import Spectrum, spectrum

__all__ = [
    "Attack",
    "AttendedKernel",
    "ConvergenceSettings",
    "Dataset",
    "GramKernel",
    "InfiniteReLU",
    "KernelInfluence",
    "LinearizedAttention",
    "ModelInfluence",
    "Ridge",
    "Spectrum",
    "Split",
    "TwoLayerReLU",
    "convergence",
    "empirical_ntk",
    "flip_rate",
    "from_arrays",
    "gradient_flow_prediction",
    "kernel_alignment",
    "kernel_distance",
    "load_data",
    "malleability",
    "rank_correlation",
    "spectrum",
    "top_k",
    "train_network",
    "two_layer_ntk",
]
