"""A report: one HTML page with the summary, an interactive timeline and memory chart, and words."""

from fsdpsim.report.page import page

__all__ = ["page"]
