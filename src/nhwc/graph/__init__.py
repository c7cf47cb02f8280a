"""Models as torch.fx graphs: how they are captured, what they hold, how they are changed."""

from .nodes.edit import add_module as add_module
from .nodes.edit import attribute as attribute
from .nodes.edit import bound as bound
from .nodes.edit import called as called
from .nodes.edit import clean as clean
from .nodes.edit import erase as erase
from .nodes.edit import filled as filled
from .nodes.edit import fresh_name as fresh_name
from .nodes.edit import module_of as module_of
from .nodes.edit import replace_module as replace_module
from .nodes.names import user_path as user_path
from .nodes.unused import erase_unused as erase_unused
from .nodes.writes import follow_writes as follow_writes
from .nodes.writes import may_be_view as may_be_view
from .nodes.writes import puts_back as puts_back
from .nodes.writes import result_may_be_view as result_may_be_view
from .nodes.writes import targets_of as targets_of
from .nodes.writes import written_into as written_into
from .tracing.captured import Captured as Captured
from .tracing.captured import capture as capture
from .tracing.captured import capture_closed as capture_closed
from .tracing.captured import graphs as graphs
from .tracing.captured import is_one_call as is_one_call
from .tracing.captured import is_one_layer as is_one_layer
from .tracing.copies import check_copies as check_copies
from .tracing.copies import own_copy as own_copy
