"""The steps of a program by what they write and read, so that two of them can become one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..tape.steps import Step, View


class Chain:
    """Steps in their order, which `join` makes fewer. A step is named by its first place."""

    def __init__(self, steps: Sequence[Step], outputs: Sequence[View]) -> None:
        self._steps = dict(enumerate(steps))
        self._returned = {id(view.buffer) for view in outputs}
        self._uses: dict[int, list[int]] = defaultdict(list)
        self._writers: dict[int, list[int]] = defaultdict(list)
        for place, step in self._steps.items():
            for use in step.uses:
                self._uses[id(use.item)].append(place)
                if use.writes:
                    self._writers[id(use.item)].append(place)

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps[place] for place in sorted(self._steps))

    def places(self, kernel: str) -> list[int]:
        """The places of all steps of a kernel."""
        return [place for place, step in self._steps.items() if step.kernel.name == kernel]

    def at(self, place: int) -> Step:
        return self._steps[place]

    def maker(self, view: View, reader: int) -> int | None:
        """The step that writes just `view`, if one does, for the step at `reader` alone."""
        buffer = id(view.buffer)
        writers = self._writers[buffer]
        if len(writers) != 1 or buffer in self._returned:
            return None
        alone = sorted(self._uses[buffer]) == sorted((writers[0], reader))
        return writers[0] if alone and same(self._steps[writers[0]].given.get("y"), view) else None

    def join(self, maker: int, reader: int, joined: Step) -> None:
        """Put `joined` where `reader` stood, for both."""
        for place in (maker, reader):
            for use in self._steps[place].uses:
                for known in (self._uses, self._writers):
                    known[id(use.item)] = [one for one in known[id(use.item)] if one != place]
        del self._steps[maker]
        self._steps[reader] = joined
        for use in joined.uses:
            self._uses[id(use.item)].append(reader)
            if use.writes:
                self._writers[id(use.item)].append(reader)


def same(y: Any, view: View) -> bool:
    """Whether both are the same numbers, counted as whatever rows and columns."""
    if not isinstance(y, View):
        return False
    lie = lambda one: (id(one.buffer), one.offset, one.pixel, one.shape[1], one.pixels)
    return bool(lie(y) == lie(view))
