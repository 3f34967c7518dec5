"""The loss of KVpop: is the entry that has just left the window ranked on the right side of the last one that stays?

Source: KVpop (arXiv 2607.05061), equations 7 and 22 to 24. At a sampled query q the teacher, the target of `target`,
ranks all entries that may leave and keeps k. The newest of them, t_new = q - w, is compared with the last that is kept,
t_bnd; the student is asked to order the two in the same way.

    loss = mean over q and cells of  omega softplus(-y (r_new(q) - r_bnd(q)) / tau),   y = +1 if the teacher keeps t_new

The scores are effective ones, `r_t + (q - t) log gamma`. The paper's text says that the decay cancels in the
difference; it does not, since the two entries are of different age, and this difference is the only way by which gamma
gets a gradient. The teacher ranks with the same gamma, through which no gradient goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from kvkeep.learn.config import LearnError
from kvkeep.learn.ranking import boundary, effective_score, static_priority
from kvkeep.policies.online import Geometry


@dataclass(frozen=True)
class LossSettings:
    """How pairs are weighed. The paper gives only `temperature` and that margins are weighed; the rest is ours.

    Attributes:
        temperature: tau, of the logistic loss.
        margins: whether a pair weighs more the further apart the teacher has the two.
        least_margin_weight: omega_min, of a pair that the teacher finds equal (before the sigmoid's own 1/2).
        margin_temperature: tau_omega, in nats of the target.
        balance: whether kept and dropped newest entries weigh the same in each head, within bounds.
        balance_bounds: lowest and highest such weight.
    """

    temperature: float = 1.0
    margins: bool = True
    least_margin_weight: float = 0.1
    margin_temperature: float = 1.0
    balance: bool = True
    balance_bounds: tuple[float, float] = (0.25, 4.0)

    def __post_init__(self) -> None:
        low, high = self.balance_bounds
        if not (
            self.temperature > 0
            and self.margin_temperature > 0
            and 0 <= self.least_margin_weight <= 1
            and 0 < low <= high
        ):
            raise LearnError(
                expected="temperatures above 0, a least weight from 0 to 1, and bounds 0 < low <= high",
                received=f"{self}",
                remedy="correct them",
            )


@dataclass(frozen=True, eq=False)
class BoundaryLoss:
    """The loss and what it is made of.

    Attributes:
        loss: a number with gradient.
        pairs: compared pairs: rows x cells x queries.
        kept: how many of the newest entries the teacher keeps.
        own: how many of those are its boundary themselves, and were compared with the entry that they displaced.
        agreed: how many pairs the student orders as the teacher does.
        weights: `[B, C, N]` omega, 1 in the mean of each layer.
    """

    loss: Tensor
    pairs: int
    kept: int
    own: int
    agreed: int
    weights: Tensor


def boundary_loss(
    scores: Tensor,
    target: Tensor,
    log_gamma: Tensor,
    queries: Tensor,
    geometry: Geometry,
    *,
    layers: int = 1,
    settings: LossSettings | None = None,
) -> BoundaryLoss:
    """The boundary-aware loss of all cells (equation 7), the mean over layers.

    Args:
        scores: `[B, C, T]` of the student, `T = S - w`; the cells of all layers, one layer after the other.
        target: `[B, C, T]` of the teacher, from `target.aggregate`.
        log_gamma: `[C]`, from `ranking.log_gamma`.
        queries: `[N]` sampled positions, from `sample_queries`.
        geometry: sinks, window, slots.
        layers: how many layers the cells are of; weights are normalised within each.
        settings: None is the default.

    Raises:
        LearnError: shapes that do not fit, a target that is not finite, no queries, or queries too early or too late.
    """
    settings = settings or LossSettings()
    _check(scores, target, log_gamma, queries, layers)
    target = target.detach().to(scores.dtype)
    fixed = log_gamma.detach()
    pair = boundary(static_priority(target, fixed), queries, geometry)
    decay = log_gamma[:, None].to(scores.dtype)
    difference = _difference(scores, pair.newest, pair.rival, queries, decay)
    label = torch.where(pair.kept, 1.0, -1.0).to(scores.dtype)
    margin = label * _difference(target, pair.newest, pair.rival, queries, decay.detach())
    weights = _weights(margin, pair.kept, settings)
    by_layer = weights.reshape(len(weights), layers, -1)
    weights = (by_layer / by_layer.mean(dim=(0, 2), keepdim=True)).reshape(weights.shape)
    loss = (weights * softplus(-label * difference / settings.temperature)).mean()
    return BoundaryLoss(
        loss=loss,
        pairs=label.numel(),
        kept=int(pair.kept.sum()),
        own=int(pair.own.sum()),
        agreed=int((label * difference.detach() > 0).sum()),
        weights=weights,
    )


def sample_queries(
    length: int, geometry: Geometry, count: int, *, late: float = 0.5, generator: torch.Generator | None = None
) -> Tensor:
    """Query positions at which an entry must leave, without repetition, in ascending order.

    The paper mixes uniform and late ones (appendix B) and gives neither number nor mix.

    Args:
        length: S of the text.
        geometry: sinks, window, slots.
        count: N; fewer where the text is too short for so many.
        late: the share of the draw whose chance rises linearly from the first such query to the last.
        generator: of the draw, on the CPU.

    Returns:
        `[N]` int64; empty where the text fits the budget.

    Raises:
        LearnError: a negative count, or a share that is none.
    """
    if count < 0 or not 0 <= late <= 1:
        raise LearnError(
            expected="a count of at least 0 and a share from 0 to 1",
            received=f"count={count}, late={late}",
            remedy="correct them",
        )
    first = geometry.held
    choices = max(0, length - first)
    if not min(choices, count):
        return torch.zeros(0, dtype=torch.int64)
    rising = torch.arange(1, choices + 1, dtype=torch.float64)
    chances = (1 - late) / choices + late * rising / rising.sum()
    drawn = chances.multinomial(min(choices, count), replacement=False, generator=generator)
    return drawn.sort().values + first


def _difference(scores: Tensor, newest: Tensor, rival: Tensor, queries: Tensor, log_gamma: Tensor) -> Tensor:
    """`r_new(q) - r_rival(q)`, `[B, C, N]`."""
    ours = effective_score(scores.index_select(-1, newest), newest, queries, log_gamma)
    theirs = effective_score(scores.gather(-1, rival), rival, queries, log_gamma)
    return ours - theirs


def _weights(margin: Tensor, kept: Tensor, settings: LossSettings) -> Tensor:
    """omega before it is normalised, `[B, C, N]` (equations 22 to 24)."""
    weights = torch.ones_like(margin)
    if settings.margins:
        least = settings.least_margin_weight
        weights = least + (1 - least) * torch.sigmoid(margin / settings.margin_temperature)
    if settings.balance:
        share = kept.to(margin.dtype).mean(dim=(0, 2), keepdim=True)  # rho, of each cell
        low, high = settings.balance_bounds
        # A share of 0 gives infinity, which the bounds take back.
        weights = weights * torch.where(kept, 1 / (2 * share), 1 / (2 * (1 - share))).clamp(low, high)
    return weights


def _check(scores: Tensor, target: Tensor, log_gamma: Tensor, queries: Tensor, layers: int) -> None:
    fits = (
        scores.dim() == 3
        and scores.shape == target.shape
        and log_gamma.shape == scores.shape[1:2]
        and queries.dim() == 1
        and layers >= 1
        and scores.shape[1] % layers == 0
    )
    if not fits:
        raise LearnError(
            expected="scores and target [B, C, T], log_gamma [C], queries [N], and layers that divide C",
            received=f"scores {tuple(scores.shape)}, target {tuple(target.shape)}, "
            f"log_gamma {tuple(log_gamma.shape)}, queries {tuple(queries.shape)}, {layers} layers",
            remedy="stack the cells of all layers along the second dimension",
        )
    if not queries.numel() or not scores.numel():
        raise LearnError(
            expected="at least one query and one cell",
            received=f"{queries.numel()} queries, scores {tuple(scores.shape)}",
            remedy="train on texts that are longer than the budget",
        )
    if not bool(target.isfinite().all()):
        raise LearnError(
            expected="a finite target",
            received="NaN or infinity",
            remedy="aggregate the log-masses with a positive eps",
        )
