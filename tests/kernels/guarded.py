"""A program for test_bounds: every buffer ends, or begins, at a page that must not be touched."""

import ctypes
import mmap
import random
import sys
from dataclasses import replace

import torch

from nhwc.kernels.convolutions.conv import conv2d_candidates
from nhwc.kernels.convolutions.spec import ConvSpec, Frames
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.layers.copies import PLANES

from .cases import Case, in_frames

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
maps = []


def guarded(values, at_end):
    """A copy of `values`, flat, with forbidden pages on both sides, close to one of them."""
    count = 4 * values.numel()
    pages = -(-count // PAGE)
    room = mmap.mmap(-1, (pages + 2) * PAGE)
    maps.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    for edge in (start, start + (pages + 1) * PAGE):
        assert libc.mprotect(edge, PAGE, 0) == 0
    offset = PAGE + (pages * PAGE - count if at_end else 0)
    copy = torch.frombuffer(room, dtype=torch.float32, count=values.numel(), offset=offset)
    copy.copy_(values.reshape(-1))
    return copy


def run(spec, at_end):
    for kernel in conv2d_candidates(spec.folded()):
        run_kernel(kernel, Case(spec), at_end)


def run_kernel(kernel, case, at_end):
    """Run one kernel of a case with each buffer at the end, or the beginning, of its pages."""
    packed = guarded(kernel.pack(case.weight.reshape(kernel.filters), case.bias), at_end)
    x = guarded(case.x.movedim(1, -1), at_end)
    beside = None
    if case.residual is not None:
        beside = guarded(case.residual.movedim(1, -1), at_end)
    y = guarded(torch.zeros(case.out_shape), at_end)
    in_frames(kernel, packed, x, y, beside)
    case.check(y.reshape(case.out_shape).movedim(-1, 1), kernel.name)
    if kernel.name == "stem" and kernel.spec.n == case.spec.n:
        y[:] = 0.0
        in_frames(kernel, packed, guarded(case.x, at_end), y, beside, change=as_planes)
        case.check(y.reshape(case.out_shape).movedim(-1, 1), kernel.name)


def as_planes(step):
    """The step of a first layer, reading N, C, H, W."""
    given = dict(zip(step.kernel.fields, step.args, strict=True)) | {PLANES: 1}
    return replace(step, args=tuple(given.values()))


def main():
    choose = random.Random(1)
    done = 0
    while done < int(sys.argv[1]):
        r, s = choose.choice([(1, 1), (3, 3), (3, 3), (3, 3), (2, 5), (7, 7)])
        spec = ConvSpec(
            n=choose.choice([1, 2]),
            c=choose.choice([1, 3, 5, 16, 19, 32, 40]),
            h=choose.randint(1, 12),
            w=choose.randint(1, 30),
            k=choose.choice([1, 7, 16, 24, 32, 37]),
            r=r,
            s=s,
            stride=choose.choice([(1, 1), (1, 1), (2, 2)]),
            padding=choose.choice([(0, 0), (1, 1), (2, 1)]),
            activation=choose.choice([Activation.RELU, Activation.GELU]),
            has_residual=choose.random() < 0.5,
        )
        if spec.c == 3 and choose.random() < 0.7:
            # The kernel of first layers wants lines as wide as its tile.
            spec = replace(spec, w=choose.randint(30, 50))
        if choose.random() < 0.1:
            # So does that of as few filters as channels.
            few = choose.choice([1, 2, 4])
            spec = replace(spec, w=choose.randint(16, 50), c=few, k=few, stride=(1, 1))
        elif r == 3 and choose.random() < 0.3:
            groups = choose.choice([2, 3, 8])
            c, k = (groups * choose.choice([4, 8, 16, 24, 40]) for _ in "ck")
            spec = replace(spec, padding=(1, 1), w=16, groups=groups, c=c, k=k)
        if choose.random() < 0.3:
            t, padding = choose.choice([(1, 0), (3, 0), (3, 1), (2, 1)])
            held = choose.random() < 0.5
            deep = Frames(choose.randint(3, 5), t, choose.choice([1, 2]), padding, held=held)
            spec = replace(spec, frames=deep)
        if spec.out_h > 0 and spec.out_w > 0:
            run(spec, at_end=done % 2 == 0)
            done += 1
    print("all inside", done)


if __name__ == "__main__":
    main()
