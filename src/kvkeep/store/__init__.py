"""Where kept entries live, and what they weigh."""

from kvkeep.store.ledger import Ledger
from kvkeep.store.ragged import Bytes, Held, RaggedLayer
from kvkeep.store.slots import SlotLayer

__all__ = ["Bytes", "Held", "Ledger", "RaggedLayer", "SlotLayer"]
