"""Where kept entries live, and what they weigh."""

from kvkeep.store.ledger import Ledger
from kvkeep.store.ragged import Bytes, Held, RaggedLayer

__all__ = ["Bytes", "Held", "Ledger", "RaggedLayer"]
