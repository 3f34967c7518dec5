"""The report of a run: one page that needs no network, a table in Markdown, and the rows as parquet."""

from kvkeep.results.report.page import write_report

__all__ = ["write_report"]
