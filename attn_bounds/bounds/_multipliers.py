"""The dual of max q0 + g.d + d.H d / 2 over the region: one multiplier a ball or box coordinate, linear in the keys.

    D(lambda) = q0 + h.(Lambda - H)^{-1} h / 2 + sum lambda (1 - |w*|^2) / 2,    h = g - Lambda w*,   Lambda - H > 0

bounds the maximum for every lambda that passes the positive-definiteness test. Lambda - H is block-arrow: each key is
eliminated onto the query, whose Schur complement is tested in the query's features, and a low-rank term comes last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._majorant import Majorant

NOISE = 2.0**-46  # 64 roundings: charged times the condition of what is inverted
MARGIN = 1e-11  # relative, far above what rounding moves an eigenvalue of the scaled matrices


@dataclass(frozen=True)
class Dual:
    """D (B,), infinite where the test failed, and the maximiser's displacement it is attained at."""

    value: torch.Tensor
    step_keys: torch.Tensor  # (B, K, m)
    step_query: torch.Tensor  # (B, k)


def barrier(maj: Majorant, key_mult: torch.Tensor, query_mult: torch.Tensor) -> torch.Tensor:
    """log det of Lambda - H in units of the radii, up to a constant, (B,); differentiable; only where it is > 0."""
    el = Eliminated(maj, key_mult, query_mult)
    mu = key_mult - maj.rest[..., None]
    copies = maj.g.shape[-1] // mu.shape[-1]
    eye = torch.eye(2, dtype=mu.dtype, device=mu.device)
    inner = eye - el.gram @ maj.block
    det = inner[..., 0, 0] * inner[..., 1, 1] - inner[..., 0, 1] * inner[..., 1, 0]
    out = copies * mu.clamp_min(1e-300).log().flatten(1).sum(1) + det.abs().clamp_min(1e-300).log().sum(1)
    if maj.gq.shape[1]:
        out = out + maj.gq.shape[1] // query_mult.shape[1] * query_mult.log().sum(1)
        out = out + 2 * torch.diagonal(el.factor, dim1=1, dim2=2).log().sum(1)
    if maj.low_rank is not None:
        Uk, Uq, J = maj.low_rank
        Zk, Zq = el.solve(Uk, Uq)
        G = torch.einsum("brkm,bskm->brs", Uk, Zk) + torch.einsum("brk,bsk->brs", Uq, Zq)
        out = out + torch.linalg.slogdet(torch.eye(J.shape[-1], dtype=J.dtype, device=J.device) - G @ J)[1]
    return out


class Eliminated:
    """(Lambda - H) with its keys eliminated: tested, and ready to solve right-hand sides."""

    def __init__(self, maj: Majorant, key_mult: torch.Tensor, query_mult: torch.Tensor) -> None:
        """Multipliers (B, K, 1 or m) and (B, 1 or k), in units of the radii."""
        self.maj = maj
        mu = key_mult - maj.rest[..., None]
        self.ok = (mu > 0).flatten(1).all(1) & (query_mult > 0).all(1)
        mu = torch.where(mu > 0, mu, torch.ones_like(mu))
        self.d_inv = maj.key_radius.square() / mu  # (B, K, 1 or m)
        plane, block = maj.plane, maj.block
        if self.d_inv.shape[-1] == 1:
            gram = self.d_inv[..., None] * (plane @ plane.transpose(1, 2))[:, None]
        else:
            gram = torch.einsum("bim,bkm,bjm->bkij", plane, self.d_inv, plane)
        self.solved, positive, saddle, self.key_condition = _inverse_less_identity(block, gram)
        self.saddles = saddle.sum(1)  # blocks with one negative eigenvalue: the low-rank term may make up for one
        allowed = 0 if maj.low_rank is None else 1
        self.ok = self.ok & (positive | saddle).all(1) & (self.saddles <= allowed)
        self.gram = gram
        if maj.gq.shape[1]:
            self._query(query_mult)

    def _query(self, query_mult: torch.Tensor) -> None:
        maj, d_inv, Y = self.maj, self.d_inv, self.solved
        fk, fq = maj.fk, maj.fq
        if d_inv.shape[-1] == 1:
            seen = d_inv[..., None] * (fk @ maj.plane.transpose(1, 2))[:, None]  # (B, K, h, 2): Fk D^-1 plane^T
        else:
            seen = torch.einsum("bhm,bkm,bim->bkhi", fk, d_inv, maj.plane)
        c = maj.c
        diagonal = maj.spread + ((c * c)[..., None] * d_inv).sum(1)  # (B, 1 or m)
        inner = (fk * diagonal[:, None]) @ fk.transpose(1, 2)
        flat = seen.transpose(1, 2).flatten(2)  # (B, h, 2 K)
        mixed = (seen @ ((c * c)[..., None, None] * Y)).transpose(1, 2).flatten(2)
        inner = inner + mixed @ flat.transpose(1, 2)
        across = seen @ ((maj.couple + _mv(Y, _mv(self.gram, maj.couple))) * c[..., None])[..., None]
        inside = self.gram + self.gram @ Y @ self.gram
        weight = (maj.couple * _mv(inside, maj.couple)).sum(-1)
        beta = maj.beta
        cross = (beta.transpose(1, 2) @ across[..., 0]) @ fq  # (B, f, f)
        T = maj.T + fq.transpose(1, 2) @ inner @ fq + cross + cross.transpose(1, 2)
        T = T + (beta * weight[..., None]).transpose(1, 2) @ beta
        self.dq_inv = maj.query_radius.square() / torch.where(query_mult > 0, query_mult, torch.ones_like(query_mult))
        if maj.features is None:
            root = self.dq_inv.sqrt()[..., None]  # (B, 1, 1) or diagonal
            if root.shape[1] == 1:
                A = T * root * root
                LT = root * T
            else:
                A = T * root * root.transpose(1, 2)
                LT = root * T
        else:
            W = (maj.features * self.dq_inv[:, None]) @ maj.features.transpose(1, 2)
            sane = torch.isfinite(W).flatten(1).all(1)
            self.ok = self.ok & sane
            L = _root(torch.where(sane[:, None, None], W, torch.zeros_like(W)))
            LT = L.transpose(1, 2) @ T
            A = LT @ L
        size = torch.linalg.matrix_norm(A)
        error = self._error_of_schur()
        self.ok = self.ok & torch.isfinite(error)
        eye = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
        A = torch.where(torch.isfinite(size)[:, None, None], A, 2 * eye)
        margin = MARGIN * (1 + torch.nan_to_num(size)) + torch.nan_to_num(error, posinf=1.0)
        factor, info = torch.linalg.cholesky_ex((1 - margin)[:, None, None] * eye - A)
        self.ok = self.ok & (info == 0) & torch.isfinite(size)
        factor = torch.where((info == 0)[:, None, None], factor, eye)
        # Theta = T + (L^T T)^T (I - A)^{-1} (L^T T), with the factor of I - A itself
        self.T, self.LT, self.factor = T, LT, factor
        self.query_condition = (1 + size) / torch.diagonal(factor, dim1=1, dim2=2).amin(1).square()

    def _error_of_schur(self) -> torch.Tensor:
        """What rounding may have moved an eigenvalue of the scaled Schur complement by, (B,).

        The keys' parts are sums in which terms as large as these may have cancelled, each key's inverse with its
        condition.
        """
        maj, d_inv = self.maj, self.d_inv.detach()
        if maj.features is None:
            heads = (maj.fq.square() * self.dq_inv[:, None]).sum((1, 2))
            scores = (maj.beta.square() * self.dq_inv[:, None]).sum(-1)
        else:
            W = (maj.features * self.dq_inv[:, None]) @ maj.features.transpose(1, 2)
            heads = ((maj.fq @ W) * maj.fq).sum((1, 2))
            scores = ((maj.beta @ W) * maj.beta).sum(-1)
        keys = maj.c.square() * (maj.fk.square().sum(1)[:, None] * d_inv).sum(-1)
        planes = (maj.couple * _mv(self.gram, maj.couple)).sum(-1)
        parts = keys * heads[:, None] + planes * scores
        return 2 * NOISE * (self.key_condition * parts).sum(1).detach()

    def _theta(self, v: torch.Tensor) -> torch.Tensor:
        """Theta v for v (B, r, f)."""
        inner = torch.cholesky_solve(self.LT @ v.transpose(1, 2), self.factor)
        return (self.T @ v.transpose(1, 2) + self.LT.transpose(1, 2) @ inner).transpose(1, 2)

    def solve(self, keys: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Solve for right-hand sides (B, r, K, m) and (B, r, k)."""
        maj = self.maj
        first = self._inverse_key(keys)
        if not query.shape[-1]:
            return first, query
        seen = first @ maj.plane[:, None].transpose(2, 3)  # (B, r, K, 2)
        onto = (seen * maj.couple[:, None]).sum(-1) @ maj.beta  # (B, r, f)
        summed = (first * maj.c[:, None, :, None]).sum(2)  # (B, r, m)
        onto = onto + (summed @ maj.fk.transpose(1, 2)) @ maj.fq
        total = query + (onto if maj.features is None else onto @ maj.features)
        v = total * self.dq_inv[:, None]
        self.query_gain = (total * v).sum(2)
        if maj.features is None:
            eta = v + self.dq_inv[:, None] * self._theta(v)
            seen_eta = eta
        else:
            eta = v + self.dq_inv[:, None] * (self._theta(v @ maj.features.transpose(1, 2)) @ maj.features)
            seen_eta = eta @ maj.features.transpose(1, 2)
        in_plane = (seen_eta @ maj.beta.transpose(1, 2))[..., None] * maj.couple[:, None]  # (B, r, K, 2)
        head = (seen_eta @ maj.fq.transpose(1, 2)) @ maj.fk  # (B, r, m)
        back = in_plane @ maj.plane[:, None] + maj.c[:, None, :, None] * head[:, :, None]
        return first + self._inverse_key(back), eta

    def _inverse_key(self, v: torch.Tensor) -> torch.Tensor:
        """X_j v_j for v (B, r, K, m)."""
        first = v * self.d_inv[:, None]
        seen = first @ self.maj.plane[:, None].transpose(2, 3)  # (B, r, K, 2)
        pushed = (seen[..., None, :] @ self.solved[:, None].transpose(3, 4))[..., 0, :]
        return first + (pushed @ self.maj.plane[:, None]) * self.d_inv[:, None]

    def noise(self, keys: torch.Tensor, query: torch.Tensor, step_keys: torch.Tensor) -> torch.Tensor:
        """What rounding may have done to h . (Lambda - H)^{-1} h, (B, r), for the right-hand sides h of the last solve.

        keys, query and step_keys: (B, r, K, m), (B, r, k) and the solution's keys. With multipliers near zero large
        terms cancel, and D in floating point could fall below its true value.
        """
        first = (keys * keys * self.d_inv[:, None]).sum(3)
        out = ((first + (keys * step_keys).sum(3).abs()) * self.key_condition[:, None]).sum(2)
        if query.shape[-1]:
            out = out + self.query_gain * self.query_condition[:, None]
        return (NOISE * out).detach()


def dual(maj: Majorant, key_mult: torch.Tensor, query_mult: torch.Tensor) -> Dual:
    """Evaluate D at multipliers (B, K, 1 or m) and (B, 1 or k) in units of the radii."""
    el = Eliminated(maj, key_mult, query_mult)
    wx, wy = maj.at
    hk = maj.g - key_mult * _over(wx, maj.key_radius)
    hq = maj.gq - query_mult * _over(wy, maj.query_radius)
    U = maj.low_rank
    rk, rq = hk[:, None], hq[:, None]
    if U is not None:
        rk, rq = torch.cat([rk, U[0]], 1), torch.cat([rq, U[1]], 1)
    sk, sq = el.solve(rk, rq)
    ok = el.ok
    dk, dq = sk[:, 0], sq[:, 0]
    errors = el.noise(rk, rq, sk) + NOISE * (rq * sq).sum(2).abs().detach()
    noise = errors[:, 0]
    if U is not None:
        Zk, Zq, J = sk[:, 1:], sq[:, 1:], U[2]
        G = torch.einsum("brkm,bskm->brs", U[0], Zk) + torch.einsum("brk,bsk->brs", U[1], Zq)
        seen = (U[0] * dk[:, None]).flatten(2).sum(2) + (U[1] * dq[:, None]).sum(2)  # (B, r)
        W = torch.linalg.inv(J) - (G + G.transpose(1, 2)) / 2
        det, trace = W[:, 0, 0] * W[:, 1, 1] - W[:, 0, 1] * W[:, 1, 0], W[:, 0, 0] + W[:, 1, 1]
        size = W.detach().abs().amax((1, 2))
        delta = errors[:, 1:].amax(
            1
        )  # of an entry of W: |x . A^-1 y| errs by no more than the worse of its two squares
        least = MARGIN * size**2 + 4 * size * delta + 2 * delta**2  # four times what moves the determinant
        # Haynsworth: with J indefinite, Lambda - H > 0 iff W has an eigenvalue of each sign or, after one saddle, W > 0
        ok = ok & torch.where(el.saddles == 0, det < -least, (det > least) & (trace > MARGIN * size + 2 * delta))
        safe = torch.where(ok, det, torch.ones_like(det))[:, None, None]
        w = _mv(_adjugate(W) / safe, seen)
        noise = noise + NOISE * (w * seen).sum(1).abs() * (size**2 / safe[:, 0, 0].abs())
        weight = w.abs().sum(1)
        noise = noise + 4 * weight * (weight * delta + (errors[:, 0] * delta).sqrt())
        dk = dk + torch.einsum("br,brkm->bkm", w, Zk)
        dq = dq + torch.einsum("br,brk->bk", w, Zq)
    gain = (hk * dk).flatten(1).sum(1) + (hq * dq).sum(1)
    room_k = key_mult * _room(wx, key_mult.shape[-1])
    room_q = query_mult * _room(wy, query_mult.shape[-1])
    value = maj.q0 + gain / 2 + room_k.flatten(1).sum(1) / 2 + room_q.sum(1) / 2
    value = value + noise.detach()
    value = torch.where(ok & torch.isfinite(value), value, torch.full_like(value, torch.inf))
    return Dual(value, dk, dq)


def apply(maj: Majorant, dk: torch.Tensor, dq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """H d for d = (dk (B, K, m), dq (B, k))."""
    seen = dk @ maj.plane.transpose(1, 2)  # (B, K, 2)
    weight = _over(maj.rest[..., None], maj.key_radius.square())
    at = _mv(maj.features, dq) if maj.features is not None else dq
    head = _mv(maj.fq, at)  # (B, h)
    in_plane = _mv(maj.block, seen) + maj.couple * _mv(maj.beta, at)[..., None]
    key = in_plane @ maj.plane + weight * dk
    key = key + maj.c[..., None] * _mv(maj.fk.transpose(1, 2), head)[:, None]
    onto = _mv(maj.fk, maj.spread * _mv(maj.fk.transpose(1, 2), head) + (maj.c[..., None] * dk).sum(1))
    query = _mv(maj.T, at) + _mv(maj.fq.transpose(1, 2), onto)
    query = query + _mv(maj.beta.transpose(1, 2), (seen * maj.couple).sum(-1))
    if maj.features is not None:
        query = _mv(maj.features.transpose(1, 2), query)
    if maj.low_rank is not None:
        Uk, Uq, J = maj.low_rank
        w = _mv(J, (Uk * dk[:, None]).flatten(2).sum(2) + (Uq * dq[:, None]).sum(2))
        key, query = key + torch.einsum("br,brkm->bkm", w, Uk), query + torch.einsum("br,brk->bk", w, Uq)
    return key, query


def _room(at: torch.Tensor, size: int) -> torch.Tensor:
    """1 - |w*|^2 per ball, or per coordinate."""
    return 1 - (at * at).sum(-1, keepdim=True) if size == 1 and at.shape[-1] != 1 else 1 - at * at


def _over(at: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    return torch.where(radius > 0, at / radius.clamp_min(1e-300), torch.zeros_like(at))


def _mv(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _root(W: torch.Tensor) -> torch.Tensor:
    """L with L L^T = W, for W positive semidefinite."""
    factor, info = torch.linalg.cholesky_ex(W)
    singular = (info != 0).nonzero()[:, 0]
    if len(singular):
        values, vectors = torch.linalg.eigh(W[singular])
        factor[singular] = vectors * values.clamp_min(0).sqrt()[:, None]
    return factor


def _adjugate(M: torch.Tensor) -> torch.Tensor:
    """Adjugate of 2 x 2 matrices."""
    first = torch.stack([M[..., 1, 1], -M[..., 0, 1]], -1)
    return torch.stack([first, torch.stack([-M[..., 1, 0], M[..., 0, 0]], -1)], -2)


def _inverse_less_identity(
    J: torch.Tensor, G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """J (I - G J)^{-1} for symmetric 2 x 2 J and G >= 0, and the signs of the eigenvalues of I - G^{1/2} J G^{1/2}.

    Returns the matrix, whether both are positive, whether one is negative (each with a margin), and a condition.
    """
    finite = torch.isfinite(G).flatten(-2).all(-1) & torch.isfinite(J).flatten(-2).all(-1)
    G = torch.where(finite[..., None, None], G, torch.zeros_like(G))
    J = torch.where(finite[..., None, None], J, torch.zeros_like(J))
    M = torch.eye(2, dtype=J.dtype, device=J.device) - G @ J
    det = M[..., 0, 0] * M[..., 1, 1] - M[..., 0, 1] * M[..., 1, 0]
    trace = M[..., 0, 0] + M[..., 1, 1]
    size = 2 + M.detach().abs().amax((-2, -1))
    positive = finite & (det > MARGIN * size * size) & (trace > MARGIN * size)
    saddle = finite & (det < -MARGIN * size * size)
    safe = torch.where(positive | saddle, det, torch.ones_like(det))
    out = J @ _adjugate(M) / safe[..., None, None]
    return (out + out.transpose(-2, -1)) / 2, positive, saddle, size * size / safe.detach().abs()
