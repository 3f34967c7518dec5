"""What a calibration has found out about one layer of a model, for policies that judge by more than a text."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

# Where a policy's `statistics` come from, unless they name a file: the queries of the text itself, or the file that
# `kvkeep calibrate` wrote for the model.
OF_TEXT, OF_MODEL = "text", "model"


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """Statistics of one layer over a corpus; float32.

    Attributes:
        query_mean: `[H, D]` mean of the queries before rotation.
        query_covariance: `[H, D, D]` their covariance.
        filters: `[H_kv, D]` the direction that the queries of a KV head's group share, after rotation; a key that
            points along it is looked at.
        copying: `[H]` attention that goes back to where the same words stood before, 0 to 1.
    """

    query_mean: Tensor
    query_covariance: Tensor
    filters: Tensor
    copying: Tensor

    def to(self, device: torch.device) -> LayerStatistics:
        """The same on a device; nothing is copied where it is there already."""
        return LayerStatistics(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})
