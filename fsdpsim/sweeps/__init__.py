"""Many scenarios at once: the grid of ``[sweep]``, its results, and the search for the best."""

from fsdpsim.sweeps.api import sweep
from fsdpsim.sweeps.grid import Grid, Point
from fsdpsim.sweeps.row import Row

__all__ = ["Grid", "Point", "Row", "sweep"]
