"""`optimize`, from a model to one that is planned, verified and not slower.

Read `stages`, the course of an optimization, first: each stage hands a value on to the next.
`task` is what is asked; `rewritten` captures a graph and runs the passes on it; `sizes` makes
graphs for the shapes of an example alone; `planner` plans the whole, and what `inner` finds in
parts that are no graph; `verdict` holds every result against the original, with `parts` where a
model decides by values; `contest` times what came of it; `report` is what is told of it all.
"""

from .report import OptimizeReport as OptimizeReport
from .stages import optimize as optimize
