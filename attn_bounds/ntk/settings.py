"""What a study runs with: one record for the command line, the report and tests."""

from __future__ import annotations

import dataclasses

from attn_bounds.ntk.malleability import Attack
from attn_bounds.ntk.ridge import Ridge


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, seeds and rules of the studies; the defaults are those of the full report."""

    n: int = 1000
    n_test: int = 300
    seeds: int = 5
    tol: float = 1e-3
    ridge: Ridge = dataclasses.field(default_factory=lambda: Ridge("dof", 50))
    attack: Attack = dataclasses.field(default_factory=Attack)
    pair: tuple[str, str] | None = None  # classes of the convergence study; None: 3 and 8 if there, else the first two
    widths: tuple[int, ...] = (64, 256, 1024, 4096)
    kernel_widths: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    kernel_seeds: int = 10  # networks at the start are cheap, and their kernels scatter
    width_seeds: int = 3
    times: tuple[float, ...] = (3.0, 10.0)
    epsilons: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.5)
    poison_fraction: float = 0.01
    defence_seeds: int = 3
    network_width: int = 512
    network_time: float = 30.0
    softmax_n: int = 200
    pretrained: bool = True  # the head of a pretrained model, where its package is installed

    @classmethod
    def quick(cls) -> Settings:
        """Smaller sizes and fewer seeds: every table and plot, in a tenth of the time."""
        return cls(
            n=400,
            n_test=200,
            seeds=2,
            widths=(64, 512, 2048),
            kernel_widths=(64, 512, 4096),
            kernel_seeds=5,
            defence_seeds=1,
            width_seeds=1,
            times=(3.0,),
            epsilons=(0.1, 0.3),
            network_width=256,
            network_time=10.0,
            softmax_n=100,
        )
