"""Why a step takes as long as it does, what its peak of memory is made of, and what would help.

``explain`` attributes every moment of the step to one cause; ``try_remedies`` simulates changes.
"""

from fsdpsim.explain.explanation import Explanation, explain
from fsdpsim.explain.trials import Trial, try_remedies

__all__ = ["Explanation", "Trial", "explain", "try_remedies"]
