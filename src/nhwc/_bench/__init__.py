"""Ways to run a model, timed side by side, and the published figures they can be held against."""

from .changes import Change as Change
from .changes import Changes as Changes
from .changes import compare as compare
from .paired import Task as Task
from .results import Benchmark as Benchmark
from .results import Case as Case
from .results import Measurement as Measurement
from .results import Published as Published
from .results import Row as Row
from .results import load_benchmark as load_benchmark
from .runner import Progress as Progress
from .runner import bench as bench
from .runner import run as run
from .suites import SUITES as SUITES
from .suites import Suite as Suite
