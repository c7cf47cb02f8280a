"""The names that users import, all of them; `nhwc` hands them on."""

from ._audit import Audit as Audit
from ._audit import audit as audit
from ._audit.findings import Finding as Finding
from ._audit.strict import strict as strict
from ._bench import bench as bench
from ._compile import backend as backend
from ._fuse import fuse as fuse
from ._ops import ops as ops
from ._optimize import optimize as optimize
from ._train import train as train
from .errors import FileError as FileError
from .errors import FormatLost as FormatLost
from .errors import InputError as InputError
from .errors import MissingPackage as MissingPackage
from .errors import ModelFailed as ModelFailed
from .errors import ModelNotFound as ModelNotFound
from .errors import NhwcError as NhwcError
from .errors import ProcessLost as ProcessLost
from .errors import VerificationError as VerificationError
from .files import load as load
from .files import save as save
from .formats import Format as Format
from .formats import convert_ as convert_
from .formats import format_of as format_of
from .formats import to_format as to_format
from .machine.environment import Environment as Environment
from .pictures import Drawing as Drawing
from .pictures import show as show
from .render import notebook as _displays_results  # noqa: F401
from .zoo import load_model as load_model
