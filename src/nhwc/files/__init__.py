"""Models in files: one header, raw tensors, operators by name, never a pickle."""

from .container import is_saved as is_saved
from .loading import load as load
from .saving import save as save
