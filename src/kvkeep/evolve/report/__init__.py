"""The page of a search: what it found, how it came there, and whether it holds."""

from kvkeep.evolve.report.page import write_search_report

__all__ = ["write_search_report"]
