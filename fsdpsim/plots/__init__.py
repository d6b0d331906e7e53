"""Pictures of a result. Functions return a matplotlib ``Figure``; only the commands save it."""

from fsdpsim.plots.exposed import exposed
from fsdpsim.plots.figure import comparison, timeline
from fsdpsim.plots.roofline import roofline
from fsdpsim.plots.style import write_figure
from fsdpsim.plots.view import NothingRanError

__all__ = ["NothingRanError", "comparison", "exposed", "roofline", "timeline", "write_figure"]
