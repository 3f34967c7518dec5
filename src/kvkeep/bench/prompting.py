"""How the texts of a sample become tokens; the code stands in a lower room, for others who measure."""

from kvkeep.hf.prompting import Context, Prompting

__all__ = ["Context", "Prompting"]
