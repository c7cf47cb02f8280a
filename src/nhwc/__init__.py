"""nhwc: the memory format of PyTorch vision models, visible, fast and proven."""

from .environment import Environment as Environment
from .errors import FileError as FileError
from .errors import FormatLost as FormatLost
from .errors import InputError as InputError
from .errors import MissingPackage as MissingPackage
from .errors import ModelFailed as ModelFailed
from .errors import ModelNotFound as ModelNotFound
from .errors import NhwcError as NhwcError
from .errors import ProcessLost as ProcessLost
from .errors import VerificationError as VerificationError
from .formats import Format as Format
from .formats import convert_ as convert_
from .formats import format_of as format_of
from .formats import to_format as to_format
from .training import train as train
from .zoo import load_model as load_model

__version__ = "0.1.0"

__all__ = [
    "Environment",
    "FileError",
    "Format",
    "FormatLost",
    "InputError",
    "MissingPackage",
    "ModelFailed",
    "ModelNotFound",
    "NhwcError",
    "ProcessLost",
    "VerificationError",
    "convert_",
    "format_of",
    "load_model",
    "to_format",
    "train",
]
