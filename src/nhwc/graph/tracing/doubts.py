"""Find what a finished trace may have missed: effects of the code that a graph does not show."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import fx, jit, nn
from torch.fx.proxy import TraceError

from ...models.contents import is_object
from ..code.mentions import mentions_of, reads_state
from ..code.questions import Questions, may_write, questions_of, why_asking
from ..modules.leaves import hooks_of, is_leaf, watchers

_BY_HOOKS = "what hooks write"

RESETS = "it sets a mode, hooks or a forward of its parts while it runs"


class Doubts:
    """Note what opaque parts do while `root` is traced, and judge the code around them.

    `written` lists the names that they write, in the order of their calls.
    """

    def __init__(self, root: nn.Module) -> None:
        self.written: list[str] = []
        self._watched = {module: watchers(module) for module in root.modules()}
        self._asking: dict[tuple[type, ...], str] = {}
        self._running: dict[tuple[CodeType, bool], Questions] = {}

    def check_watched(self, module: nn.Module) -> None:
        """Refuse code that sets a mode, hooks or a `forward` of its parts while it runs."""
        for part in module.modules():
            if self._watched.get(part, ()) != watchers(part):
                raise TraceError(RESETS)

    def note_written(self, module: nn.Module, given: Iterable[Any]) -> None:
        """Note what a part writes that stays a call: it does not run here, so its code is read."""
        for part in module.modules():
            if not isinstance(part, jit.ScriptModule) and not is_leaf(part):
                self.written += mentions_of(part).written
            if any(map(may_write, hooks_of(part))):
                self.written.append(_BY_HOOKS)
        if isinstance(module, jit.ScriptModule) or is_leaf(module):
            return
        filled = mentions_of(module).written & {*inspect.signature(module.forward).parameters}
        if filled and any(isinstance(value, list | dict | set) for value in given):
            raise TraceError("a list or dict is filled by a part that cannot be traced")

    def check_written(self, module: nn.Module, since: int) -> None:
        """Refuse code that reads what its opaque parts write."""
        written = {*self.written[since:]}
        if not written or isinstance(module, fx.GraphModule) or is_leaf(module):
            return
        said = mentions_of(module)
        seen = written & (said.read_off_others | (said.otherwise & {*vars(module)}))
        if seen:
            raise TraceError(f"a part that cannot be traced writes {min(seen)}")
        reads = reads_state(module) if _BY_HOOKS in written else ""
        if reads:
            raise TraceError(f"parts of it have hooks, and what they do it may see: {reads}")

    def check_code(self, module: nn.Module) -> None:
        """Refuse code that asks its values a question that a traced value cannot answer."""
        held = [*vars(module).values()]
        own = any(isinstance(value, FunctionType) for value in held)
        kind = (type(module), *(type(value) for value in held if is_object(value)))
        if kind not in self._asking or own:
            graph = isinstance(module, fx.GraphModule)
            self._asking[kind] = "" if graph else why_asking(module)
        if self._asking[kind]:
            raise TraceError(self._asking[kind])

    def running(self, frame: FrameType) -> Questions:
        """What code that runs asks: not all that is called can be read before.

        A method may ask about the object that has it, which is no traced value.
        """
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        method = not issubclass(type(first), (fx.Proxy, dict, list, tuple, type(None)))
        if (code, method) not in self._running:
            self._running[code, method] = questions_of(code, frame.f_globals, method=method)
        return self._running[code, method]
