"""Attention over the ragged store."""

from kvkeep.attention.dispatch import attend, attend_prompt

__all__ = ["attend", "attend_prompt"]
