"""Joint bounds of what a bilinear score does beyond its tangent plane, from affine forms of queries and keys.

McCormick's planes pay the sum over coordinates of (width of q_c) (width of k_c), as if every coordinate could be at its
end at once. The coordinates are functions of the same few inputs, and q . k beyond its plane is one quadratic form:

    q - q0 = Q t + e,  k - k0 = K t + e',  |t| <= 1 (the input box, or each block of t in a ball),  |e| <= E, |e'| <= E'
    (q - q0) . (k - k0) = y^T sym(G_q^T G_k) y,  y = (t, e / E, e' / E') in the unit box, G_q = [Q E 0], G_k = [K 0 E']

For any weights D > 0,  y^T S y <= sum(D) max(lambda_max(D^-1/2 S D^-1/2), 0)  on the unit box, and with one weight a
block, summed over blocks, on a product of balls. S has rank 2 c, so its eigenvalues are those of a 2c x 2c matrix.
On the heads of the ViT benchmark's pgd network this is a fifth to a third of McCormick's sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .forms import affine_forms, concretized
from .held import Held, Region

_CHUNK = 1 << 24  # numbers in one block of coefficients


class JointScores:
    """Planes' points and remainders for the score differences q_i . (k_k - k_j), j < k, of a ScoreDifferences node.

    query (b, h, i, c) and key (b, h, j, c) are the points at which q . k is linearised; `above` >= 0 and `below` <= 0,
    (b, h, i, pairs), enclose (q_i - query_i) . ((k_k - key_k) - (k_j - key_j)) over the region. Nothing here depends on
    the rows that are propagated: it is computed once, and holds while no bound it rests on gets wider.
    """

    def __init__(self, network, node, pairs: tuple[Tensor, Tensor]):
        region = Region.find(network)
        query, key = (_Vectors(network, node.inputs[side], region, turned=bool(side)) for side in (0, 1))
        first, second = pairs
        self.query, self.key = query.centre, key.centre
        batch, heads, n_q = query.centre.shape[:3]
        bounds = query.centre.new_empty(2, batch, heads, n_q, len(first))
        step = max(1, _CHUNK // (2 * query.form.shape[-2] * query.form.shape[-1]))
        for b in range(batch):
            for h in range(heads):
                form = key.form[b, h, second] - key.form[b, h, first]
                size = (key.size[b, h, second] + key.size[b, h, first]).sqrt()
                error = key.error[b, h, second] + key.error[b, h, first]
                for i in range(n_q):
                    for part in torch.arange(len(first), device=form.device).split(step):
                        one = query.form[b, h, i], query.error[b, h, i], query.size[b, h, i].sqrt()
                        bounds[:, b, h, i, part] = remainder(*one, form[part], error[part], size[part], region.block)
        self.above, self.below = bounds
        self.is_bound = all(bool(torch.isfinite(t).all()) for t in (bounds, self.query, self.key))
        self.held = Held(network, node, *node.inputs)

    @staticmethod
    def applies(network, node, n_pairs: int, max_work: int) -> bool:
        """Whether the region is of a kind we know and the products that the eigenvalue problems need are few enough."""
        region = Region.find(network)
        if region is None or n_pairs == 0:
            return False
        batch, heads, n_q, width = node.inputs[0].lower.shape
        return batch * heads * n_q * n_pairs * region.block.numel() * (2 * width) ** 2 <= max_work


class _Vectors:
    """Each vector of a node as centre + form t + e: (b, h, m, c), (b, h, m, c, x), and the size of e, (b, h, m, c)."""

    def __init__(self, network, node, region: Region, turned: bool):
        low_bias, high_bias, [(root, low, high)] = affine_forms(network, node)
        low, high = (a.flatten(2).transpose(0, 1) for a in (low, high))  # (b, size, x)
        form = (low + high) / 2
        centre = torch.einsum("bsx,bx->bs", form, region.centre) + (low_bias + high_bias) / 2
        # half of u(x) - l(x) at its largest: what the middle form may be wrong by, around its own centre
        error = (concretized(root, high - low, 1) + high_bias - low_bias).clamp(min=0) / 2
        shape = node.output_shape[1:]
        form = form * region.radius.unsqueeze(1)
        error = error + 4 * torch.finfo(form.dtype).eps * (form.abs().sum(-1) + centre.abs())  # rounding of the centre
        self.centre, self.form, self.error = (_arranged(t, shape, turned).detach() for t in (centre, form, error))
        size = self.form.square().sum(-2)  # (b, h, m, x)
        blocks = size.new_zeros(*size.shape[:-1], int(region.block.max()) + 1)
        self.size = blocks.index_add(-1, region.block, size)  # of every block of generators, squared


def _arranged(t: Tensor, shape, turned: bool) -> Tensor:
    """(b, size, ...) as (b, h, m, c, ...); `turned` says that the node is (b, h, c, m)."""
    t = t.view(t.shape[0], *shape, *t.shape[2:])
    return t.transpose(2, 3) if turned else t


def remainder(
    q_form: Tensor, q_error: Tensor, q_size: Tensor, k_form: Tensor, k_error: Tensor, k_size: Tensor, block: Tensor
) -> Tensor:
    """Enclosures (2, m) of (Q t + e) . (K t + e') for |e| <= E, |e'| <= E' and every block of t in a unit ball.

    q_form (c, x), q_error (c), k_form (m, c, x), k_error (m, c), block (x,) the block of every coordinate of t; the
    largest value comes first, then the smallest. The sizes, (blocks) and (m, blocks), set the blocks' weights; any
    positive ones are sound, the blocks' norms are good.
    """
    c = q_form.shape[0]
    tiny = torch.finfo(q_form.dtype).tiny ** 0.5
    # (s q) . (k / s) is the same for every s: make both sides equally large
    ratio = (k_size.sum(-1) + k_error.sum(-1)).clamp(min=tiny) / (q_size.sum() + q_error.sum()).clamp(min=tiny)
    scale = ratio.clamp(1e-12, 1e12).sqrt().unsqueeze(-1)  # (m, 1)
    q_error, k_error = q_error * scale, k_error / scale
    weights = q_size * scale + k_size / scale + tiny  # (m, blocks); those of e and e' are their own sizes
    root = weights.rsqrt()[:, block].unsqueeze(1)
    generators = torch.cat([q_form * (scale.unsqueeze(-1) * root), k_form * (root / scale.unsqueeze(-1))], 1)
    gram = (generators @ generators.transpose(-1, -2)).double()
    if not torch.isfinite(gram).all():
        return k_form.new_full((2, len(k_form)), torch.inf)
    # the products' own rounding, and a factor for Cholesky: more generators, so still an enclosure
    slack = (1e-5 if q_form.dtype == torch.float32 else 1e-12) * torch.diagonal(gram, dim1=1, dim2=2).sum(
        -1, keepdim=True
    )
    gram = gram + torch.diag_embed(torch.cat([q_error, k_error], -1).double() + slack + tiny)
    factor = torch.linalg.cholesky(gram)
    product = factor[:, :c].transpose(-1, -2) @ factor[:, c:]
    values = torch.linalg.eigvalsh((product + product.transpose(-1, -2)) / 2)
    total = (weights.sum(-1) + q_error.sum(-1) + k_error.sum(-1)).double() * (1 + 1e-6)
    return torch.stack([total * values[:, -1].clamp(min=0), total * values[:, 0].clamp(max=0)]).to(q_form.dtype)
