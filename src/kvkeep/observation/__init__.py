"""What a policy may see of a layer: the entries that it holds, and the queries that may judge them."""

from kvkeep.observation.needs import Needs, SecondPass
from kvkeep.observation.observation import Observation
from kvkeep.observation.rotary import Rotary
from kvkeep.observation.smoothing import smooth

__all__ = ["Needs", "Observation", "Rotary", "SecondPass", "smooth"]
