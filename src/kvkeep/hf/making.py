"""Makes the layers of a KeepCache, one for each layer of the model."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from kvkeep.hf.calibrations import Calibration
from kvkeep.hf.caps import Cap
from kvkeep.hf.layers import KeepLayer
from kvkeep.hf.online import OnlineLayer
from kvkeep.hf.options import CacheOptions
from kvkeep.hf.progress import Progress
from kvkeep.hf.rerotation import KeyRerotation
from kvkeep.hf.sliding import KeepSlidingLayer


def make_layers(
    model: PreTrainedModel,
    options: CacheOptions,
    cap: Cap | None,
    known: Mapping[str, Calibration],
    progress: Progress,
) -> list[KeepLayer | OnlineLayer | KeepSlidingLayer]:
    """A layer for each layer of the model.

    Args:
        model: unwrapped.
        options: of the cache.
        cap: what a cell may hold under an online policy; None where texts are cut.
        known: the calibrations that the policies ask for, by the places that they name.
        progress: shared by all layers.
    """
    evictable = [plan.index for plan in options.plans if plan.window is None]
    policies = dict(zip(evictable, options.table, strict=cap is None))
    layers: list[KeepLayer | OnlineLayer | KeepSlidingLayer] = []
    for plan in options.plans:
        if plan.window is not None:
            layers.append(KeepSlidingLayer(plan.window, progress))
            continue
        if cap is not None:
            layers.append(OnlineLayer(plan.index, cap, progress))
            continue
        peers = [index for index, policy in policies.items() if policy == policies[plan.index]]
        layers.append(
            KeepLayer(
                index=plan.index,
                ordinal=peers.index(plan.index),
                layers=len(peers),
                policy=policies[plan.index],
                protect=options.protect,
                progress=progress,
                statistics={place: each.layers[plan.index] for place, each in known.items()},
                rerotation=KeyRerotation.of(model.get_decoder(), plan.index) if options.rerotate_keys else None,
            )
        )
    return layers
