"""RULER's thirteen tasks ("ruler-style": generated anew, in kvkeep's words unless the original ones are asked for)."""

from kvkeep.tasks.ruler.counting import RulerCwe, RulerFwe
from kvkeep.tasks.ruler.niah import VARIANTS, RulerNiah
from kvkeep.tasks.ruler.qa import RulerQa
from kvkeep.tasks.ruler.vt import RulerVt
from kvkeep.tasks.ruler.wording import OWN, Frame, Wording

__all__ = ["OWN", "VARIANTS", "Frame", "RulerCwe", "RulerFwe", "RulerNiah", "RulerQa", "RulerVt", "Wording"]
