"""Models as torch.fx graphs: how they are captured, what they hold, how they are changed."""

from .captured import Captured as Captured
from .captured import capture as capture
from .captured import capture_closed as capture_closed
from .captured import graphs as graphs
from .captured import is_one_call as is_one_call
from .captured import is_one_layer as is_one_layer
from .copies import check_copies as check_copies
from .copies import own_copy as own_copy
from .edit import add_module as add_module
from .edit import attribute as attribute
from .edit import bound as bound
from .edit import called as called
from .edit import clean as clean
from .edit import erase as erase
from .edit import filled as filled
from .edit import fresh_name as fresh_name
from .edit import module_of as module_of
from .edit import replace_module as replace_module
from .names import user_path as user_path
from .unused import erase_unused as erase_unused
from .writes import follow_writes as follow_writes
from .writes import may_be_view as may_be_view
from .writes import puts_back as puts_back
from .writes import result_may_be_view as result_may_be_view
from .writes import targets_of as targets_of
from .writes import written_into as written_into
