"""Calibration: statistics of a model over a corpus, computed once, for policies that judge by them.

`qfilter` and `duo` need one, `expected-attention[statistics=model]` uses one. See docs/calibrate.md.
"""

from kvkeep.calibration.running import calibrate
from kvkeep.hf.calibrations import Calibration, calibration_path
from kvkeep.tasks.pieces import cut_pieces

__all__ = ["Calibration", "calibrate", "calibration_path", "cut_pieces"]
