"""A tensor's memory, drawn: which number lies where, in a terminal and on a page."""

from .memory import Memory as Memory
from .memory import memory_of as memory_of
from .show import Drawing as Drawing
from .show import show as show
