"""Let a config's L2 ball around all tokens together stand for one ball of that radius around each token."""

from __future__ import annotations

from attn_bounds_lirpa import PerturbationTokenBall
from auto_LiRPA import BoundedTensor

from attn_bounds.errors import RegionError


def use_token_balls(network) -> None:
    """Replace the region of every bound that `network` computes: a ball of radius r becomes a ball of r a token.

    The joint ball lies inside, so what is proved holds for it too. The verifier's configs have no region of this kind.
    """
    radius: dict[str, float] = {}

    def wrap(function):
        def with_balls(x=None, *args, **kwargs):
            return function(_tokens(x, radius), *args, **kwargs)

        return with_balls

    for name in ("compute_bounds", "init_alpha"):
        setattr(network, name, wrap(getattr(network, name)))


def _tokens(x, radius: dict[str, float]):
    if x is None or isinstance(getattr(x[0], "ptb", None), PerturbationTokenBall):
        return x
    region = getattr(x[0], "ptb", None)
    if region is None or region.norm != 2:
        raise RegionError(f"token_balls: expected specification.norm: 2 in the config, got {region}")
    if float(region.eps) > 0:  # subdomains of the verifier may come without their radius
        radius["r"] = float(region.eps)
    if "r" not in radius:
        raise RegionError("token_balls: expected specification.epsilon > 0")
    return (BoundedTensor(x[0].data, PerturbationTokenBall(radius["r"])), *x[1:])
