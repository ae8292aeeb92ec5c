"""The options of a BoundedModule outside alpha-beta-CROWN, which sets some of them by itself."""

OPTIONS = {
    "conv_mode": "matrix",  # dense coefficients
    "softmax": "lse",  # the one that the attention operators find and replace
    "sparse_intermediate_bounds": False,
    "sparse_features_alpha": False,
    "sparse_spec_alpha": False,
}
