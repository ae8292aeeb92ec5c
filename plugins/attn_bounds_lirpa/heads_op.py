"""Bound operators of whole attention heads: tokens in, the heads' outputs out.

A row of the output gets the best, at the tokens' present region, of

    the relaxation for wide ranges (`tokens.Scores.upper`), its parameters free,
    an affine bound whose offset the library's engine proves: second order around a free slope, the gradient by default,
    where nothing but this operator lies between the network's input and the row: the certificates of its largest value.

The region is the perturbation itself where the tokens are the network's input, else the box of their bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_bounds.errors import NotFiniteError, UnsupportedModelError

from .base import RelaxedOp, interval_ends, round_up
from .certified import Certified
from .regions import PerturbationTokenBall
from .scaling import constant_value
from .tokens import Place, Scores, TokenHeads, default_parameters, normal_mask

MAX_WHOLE = 64  # (row, head, query) of a batch element that are certified, where that is the whole bound
MAX_GROUPS = 32  # the same where other paths lie beside the operator, and an affine bound gains some percent


class BoundTokenHeads(RelaxedOp):
    """Heads that read the tokens (b, n, d) of the first input; a subclass says which, and how outputs are laid out."""

    def __init__(
        self, attr=None, inputs=None, output_index=0, options=None, certificate=None, max_groups: int = MAX_GROUPS
    ):
        super().__init__(attr, inputs, output_index, options)
        self.requires_input_bounds = [0]
        self.certificate, self.max_groups = certificate, max_groups
        self.scores: Scores | None = None
        self.constants: dict = {}  # (start node, side): the rows and region of the last certificates, and those
        self.multipliers: dict = {}  # (start node, side): what the last affine bounds were of, and theirs

    def heads(self) -> TokenHeads:
        """The heads as they are now; the same object while their weights do not change."""
        raise NotImplementedError

    def by_head(self, rows: Tensor) -> Tensor:
        """Rows of the output, (s, b, ...), as (s, b, h, n, c)."""
        raise NotImplementedError

    def laid_out(self, output: Tensor) -> Tensor:
        """An output (b, h, n, c) in the operator's layout."""
        raise NotImplementedError

    def ranges(self) -> Scores:
        """The scores' ranges at the tokens' present region."""
        return self._ranges(Place.of(self.inputs[0]))

    def _ranges(self, place: Place) -> Scores:
        heads, old = self.heads(), self.scores
        if old is None or old.heads is not heads or not old.place.same(place):
            self.scores = Scores(heads, place)
        return self.scores

    def interval_propagate(self, *v):
        root = self.inputs[0]
        inside = isinstance(getattr(root, "perturbation", None), PerturbationTokenBall)
        low, high = self._ranges(Place.of(root) if inside else Place.box(*interval_ends(v[0]))).interval()
        dtype = v[0][0].dtype
        return -round_up(self.laid_out(-low), dtype), round_up(self.laid_out(high), dtype)

    def output_interval(self):
        return tuple(self.laid_out(end) for end in self.ranges().interval())

    def most(self, index, rows):
        return self.ranges().place.upper(rows, rows.new_zeros(rows.shape[:2]))

    def parameter_shape(self):
        n, d = self.inputs[0].output_shape[1:]
        return (self.heads().W_Q.shape[0] * n * n * 4 + n * d,)

    def default_parameters(self, like):
        n, d = self.inputs[0].output_shape[1:]
        wide = default_parameters(self.heads().W_Q.shape[0], n, like)
        return torch.cat([wide.flatten(), like.new_zeros(n * d)]).unsqueeze(0)

    def clip(self, parameters):
        n, d = self.inputs[0].output_shape[1:]
        wide = parameters[..., : -n * d].unflatten(-1, (-1, 4))
        wide[..., 0].clamp_(0, 1)
        wide[..., 2:].clamp_(0, 1)

    def upper_rows(self, rows, parameters):
        rows, scores = self.by_head(rows), self.ranges()
        n, d = scores.place.centre.shape[1:]
        free = parameters.requires_grad
        whole = _is_whole(self.asked[0], self)
        few = (rows != 0).any(-1).sum((0, 2, 3)) <= (MAX_WHOLE if whole else self.max_groups)  # of each batch element
        certified = self._certified(torch.where(few.view(1, -1, 1, 1, 1), rows, 0.0), scores)
        bounds = []
        if whole and certified is not None:
            constant, closed = self._constants(certified, rows, scores, free)
            bounds.append((constant.new_zeros(*constant.shape, n, d), constant.masked_fill(~few, torch.inf)))
            if bool((closed & few).all()) and not free:
                return self._answer(bounds[0])
        wide = parameters[..., : -n * d].unflatten(-1, (rows.shape[2], n, n, 4))
        bounds.append(scores.upper(rows, wide))
        # where a row is one group and that is all there is, no slope says more than the largest value does
        if certified is not None and (not whole or bool((certified.counts > 1).any())):
            tilts = parameters[..., -n * d :].unflatten(-1, (n, d))
            found = self._affine(certified, tilts if free else None)
            if found is not None:
                bounds.append((found[0], found[1].masked_fill(~few, torch.inf)))
        return self._answer(_best(bounds, scores.place))

    def _answer(self, bound):
        slope, constant = bound
        return (slope, *[None] * (len(self.inputs) - 1)), constant

    def _certified(self, rows: Tensor, scores: Scores) -> Certified | None:
        """The library's problems of the rows, where there are any and it knows the mask."""
        keys = scores.heads.attended(rows.shape[3])
        if keys is None or not bool(rows.any()) or not scores.takes_out(keys):
            return None
        try:
            return Certified(scores.heads, scores.place, rows, keys, self.certificate)
        except NotFiniteError:
            return None  # a nominal value beyond float64: the other bounds say what there is to say

    def _constants(self, certified: Certified, rows: Tensor, scores: Scores, keep: bool) -> tuple[Tensor, Tensor]:
        """The rows' largest values (s, b), and whether they are exact; kept from step to step of alpha mode."""
        name = getattr(self.asked[0], "name", None), self.asked[1]
        kept = self.constants.get(name) if keep else None
        if kept is None or kept[0] is not scores or kept[1].shape != rows.shape or not torch.equal(kept[1], rows):
            try:
                constant, gap = certified.largest()
            except (torch.linalg.LinAlgError, NotFiniteError):  # numbers near the end of float64: no bound from here
                constant = gap = torch.full_like(certified.counts, torch.inf)
            closed = (certified.counts == 1) & (gap <= 1e-9 * (1 + (constant - gap).nan_to_num(nan=0.0).abs())) | (
                certified.counts == 0
            )
            kept = scores, rows.detach().clone(), constant, closed
            self.constants = {**self.constants, name: kept} if keep else {}
        return kept[2:]

    def _affine(self, certified: Certified, tilts: Tensor | None):
        """Affine bounds with free slopes; `tilts` in units that are worth the remainder of the bound without them."""
        name = getattr(self.asked[0], "name", None), self.asked[1]
        kept = self.multipliers.get(name) if tilts is not None else None
        kept = kept[1] if kept is not None and kept[0] == certified.kinds else None
        try:
            if tilts is None:
                slope, constant, _ = certified.affine()
                return slope, constant
            with torch.no_grad():
                unit = certified.tilt_unit(*certified.affine(kept=kept)[:2])
            slope, constant, used = certified.affine(tilts * unit[..., None, None], kept)
            self.multipliers[name] = certified.kinds, used
            return slope, constant
        except (torch.linalg.LinAlgError, NotFiniteError):
            return None


def _best(bounds: list[tuple[Tensor, Tensor]], place: Place) -> tuple[Tensor, Tensor]:
    """Of bounds (slope (s, b, n, d), constant (s, b)) the one that is least at the region's worst, row by row."""
    if len(bounds) == 1:
        return bounds[0]
    slopes, constants = (torch.stack(torch.broadcast_tensors(*part)) for part in zip(*bounds, strict=True))
    with torch.no_grad():
        tops = torch.stack([place.upper(slope, constant) for slope, constant in bounds])
        least = torch.nan_to_num(tops, nan=torch.inf).argmin(0, keepdim=True)  # (1, s, b)
    slope = slopes.gather(0, least[..., None, None].expand(1, *slopes.shape[1:]))
    return slope[0], constants.gather(0, least)[0]


def _is_whole(start, node) -> bool:
    """Whether `node` reads the network's input, and is all there is between that and `start`."""
    if start is None or getattr(node.inputs[0], "perturbation", None) is None:
        return False
    todo, seen = [start], set()
    while todo:
        current = todo.pop()
        if current is node or current.name in seen or not current.perturbed:
            continue
        if getattr(current, "perturbation", None) is not None:
            return False
        seen.add(current.name)
        todo.extend(current.inputs)
    return True


class BoundAttentionHead(BoundTokenHeads):
    """Heads with their weights as inputs, see `modules.AttentionHeads`: tokens to outputs side by side (b, n, h c).

    Inputs: x, W_Q (h c, d), b_Q (h c,), W_K, b_K, W_V, b_V, and a mask (n, n) or (1, 1) that is added to the scores.
    Attributes: heads, scale.
    """

    def __init__(self, attr=None, inputs=None, output_index=0, options=None):
        super().__init__(attr, inputs, output_index, options)
        self.count, self.scale = int(attr["heads"]), float(attr["scale"])
        self.read: tuple[list[Tensor], TokenHeads] | None = None

    def forward(self, x, *weights):
        return attention_heads(x, *weights, heads=self.count, scale=self.scale)

    def heads(self):
        if any(node.perturbed for node in self.inputs[1:]):
            raise UnsupportedModelError(f"{self.name}: weights: expected constants, got a perturbed input")
        weights = [constant_value(node) for node in self.inputs[1:]]
        if self.read is None or not all(torch.equal(a, b) for a, b in zip(self.read[0], weights, strict=True)):
            parts = [weight.double().unflatten(0, (self.count, -1)) for weight in weights[:6]]
            heads = TokenHeads(*parts, scale=self.scale, mask=normal_mask(weights[6]))
            self.read = [weight.clone() for weight in weights], heads
        return self.read[1]

    def by_head(self, rows):
        return rows.unflatten(-1, (self.count, -1)).transpose(2, 3)

    def laid_out(self, output):
        return output.transpose(1, 2).flatten(2)


def attention_heads(x: Tensor, w_q, b_q, w_k, b_k, w_v, b_v, mask, heads: int, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v of tokens x (b, n, d), head by head; outputs side by side (b, n, h c)."""
    q, k, v = (
        (x @ weight.transpose(0, 1) + bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for weight, bias in ((w_q, b_q), (w_k, b_k), (w_v, b_v))
    )
    return (torch.softmax(scale * q @ k.transpose(-1, -2) + mask, -1) @ v).transpose(1, 2).flatten(2)
