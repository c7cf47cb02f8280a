"""`torch.compile(model, backend="nhwc")`: each graph that Dynamo captures goes through `optimize`.

Read `backend` first, which is what torch calls with each graph. `behaviour` finds out what a graph
does besides computing: writes, random numbers, what it returns that shares memory. `core` cuts out
what is worth planning, with its weights inside, and leaves the rest to torch. `weights` notices
when these change. `planned` is what torch calls in the place of the graph.
"""

from .backend import Backend as Backend
from .backend import backend as backend
from .backend import by_name as by_name
