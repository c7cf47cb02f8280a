"""Ways to run a model, timed side by side, and the published figures they can be held against."""

from .compare import Change as Change
from .compare import Changes as Changes
from .compare import compare as compare
from .paired import Task as Task
from .results import Benchmark as Benchmark
from .results import Case as Case
from .results import Measurement as Measurement
from .results import Published as Published
from .results import Row as Row
from .run import Progress as Progress
from .run import bench as bench
from .run import run as run
from .suites import SUITES as SUITES
from .suites import Suite as Suite
