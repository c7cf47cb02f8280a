"""The operators of the installed torch and what becomes of channels last in them; the rules."""

from ._ops import DTYPES as DTYPES
from ._ops import ops as ops
from .changes import Difference as Difference
from .changes import difference as difference
from .custom import check_operator as check_operator
from .rules import RuleResult as RuleResult
from .rules import check_rules as check_rules
from .table import Operator as Operator
from .table import OperatorTable as OperatorTable
from .table import Outcome as Outcome
from .table import Speed as Speed
from .table import Tally as Tally
from .table import load_table as load_table
