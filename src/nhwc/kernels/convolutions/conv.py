"""The convolution kernels to choose from, each packing its weights and running on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor

from ...errors import InputError
from ...formats import Format, strides_of, to_format
from ..language import isa as isas
from ..language.compiler import Kernel
from ..product.microkernel import TILE
from ..tape.invoke import Invocation
from ..tape.steps import Step, View, view_of
from . import direct, few, grouped, narrow, stem, winograd
from .spec import IMAGE, ConvSpec
from .tiles import FORMS


@dataclass(frozen=True)
class ConvKernel:
    """One way to compute the convolution `spec`; `exact` if it sums the products that it names.

    >>> kernel = conv2d_candidates(ConvSpec(1, 16, 8, 8, 32, 3, 3, padding=(1, 1)))[0]
    >>> packed = kernel.pack(torch.randn(32, 16, 3, 3), None)
    >>> compute(kernel, torch.randn(1, 16, 8, 8), packed, None).shape
    torch.Size([1, 32, 8, 8])
    """

    name: str
    exact: bool
    spec: ConvSpec

    @property
    def filters(self) -> tuple[int, ...]:
        """The shape of its weight; that of a volume's has a side for the frames."""
        spec, t = self.spec, self.spec.frames.t
        return (spec.k, spec.c // spec.groups, *[t] * (t > 1), spec.r, spec.s)

    @property
    def copies(self) -> float:
        """How many times the numbers of its filters it holds."""
        return winograd.copies(FORMS[self.name], self.spec) if self.name in FORMS else 1.0

    @property
    def dense(self) -> bool:
        """Whether what it writes and adds must lie without gaps."""
        return self.name in ("few", "narrow")

    @property
    def reads_dense(self) -> bool:
        """Whether the image must lie without gaps."""
        return self.name == "narrow"

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Weight and bias as one flat tensor, laid out for this kernel and this machine."""
        if tuple(weight.shape) != self.filters:
            raise InputError(
                f"the weight is {tuple(weight.shape)}; the convolution has {self.filters}."
            )
        return _method(self.name).pack(self.spec, weight, bias)

    def steps(
        self, x: View, y: View, packed: Tensor | View, residual: View | None = None
    ) -> tuple[Step, ...]:
        """The steps that compute `y` on a tape.

        Views may be channel slices of larger buffers, unless they must be dense.
        """
        return _method(self.name).steps(self.spec, x, y, packed, residual)


@dataclass(frozen=True)
class _Method:
    pack: Callable[[ConvSpec, Tensor, Tensor | None], Tensor]
    steps: Callable[[ConvSpec, View, View, Tensor | View, View | None], tuple[Step, ...]]
    floats: Callable[[ConvSpec], int]


def _method(name: str) -> _Method:
    if name in ("pointwise", "direct"):
        return _Method(direct.pack_direct, direct.direct_steps, direct.packed_floats)
    if name == "stem":
        return _Method(direct.pack_direct, stem.stem_steps, direct.packed_floats)
    if name == "grouped":
        return _Method(grouped.pack_grouped, grouped.grouped_steps, grouped.packed_floats)
    if name == "few":
        return _Method(few.pack_few, few.few_steps, few.packed_floats)
    if name == "narrow":
        return _Method(narrow.pack_narrow, narrow.narrow_steps, narrow.packed_floats)
    form = FORMS[name]
    return _Method(
        partial(winograd.pack_winograd, form),
        partial(winograd.winograd_steps, form),
        partial(winograd.packed_floats, form),
    )


def conv2d_candidates(spec: ConvSpec) -> tuple[ConvKernel, ...]:
    """The kernels that can compute `spec`, the exact ones first.

    >>> [k.name for k in conv2d_candidates(ConvSpec(1, 64, 56, 56, 64, 3, 3, padding=(1, 1)))]
    ['direct', 'winograd4x4', 'winograd2x2', 'winograd4x4lean']
    """
    pointwise = spec.frames.t == spec.r == spec.s == 1
    found = [ConvKernel("pointwise" if pointwise else "direct", True, spec)]
    image = spec.frames == IMAGE
    if stem.serves(spec):
        found.append(ConvKernel("stem", True, spec))
    if image and spec.wanted is None and grouped.serves(spec):
        found.append(ConvKernel("grouped", True, spec))
    if few.serves(spec):
        found.append(ConvKernel("few", True, spec))
    if narrow.serves(spec):
        found.append(ConvKernel("narrow", True, spec))
    found += [ConvKernel(form.name, False, spec) for form in winograd.forms_of(spec)]
    return tuple(found)


def kernel_for(name: str, spec: ConvSpec) -> ConvKernel:
    """The kernel of this name for `spec`, which may have other sizes than it was packed for."""
    for kernel in conv2d_candidates(spec):
        if kernel.name == name:
            return kernel
    raise InputError(f"kernel {name!r} does not serve {spec}.")


def all_kernels() -> tuple[Kernel, ...]:
    """All that any convolution here may need compiled."""
    narrow_and_wide = [grouped.grouped_kernel(n, s) for n in (0, *grouped.NARROW) for s in (1, 2)]
    stems = [stem.stem_kernel(step) for step in stem.STEPS]
    tiled = [kernel for form in FORMS.values() for kernel in (form.kernel, form.apart)]
    fews = [few.few_kernel(filters) for filters in few.filters_served()]
    sizes = product(narrow.CHANNELS, narrow.VECTORS)
    narrows = [narrow.narrow_kernel(*size) for size in sizes]
    rest = (*narrow_and_wide, *stems, *fews, *narrows)
    return (direct.DIRECT, *TILE.members(isas.host()), *tiled, *rest)


def compute(kernel: ConvKernel, x: Tensor, packed: Tensor, residual: Tensor | None) -> Tensor:
    """Run `kernel` on tensors of any format; the result is channels last."""
    spec = kernel.spec
    shape = (spec.n, spec.k, spec.out_h, spec.out_w)
    y = x.new_empty_strided(shape, strides_of(shape, Format.CHANNELS_LAST), dtype=torch.float32)
    if y.numel() == 0:
        return y
    needed = _method(kernel.name).floats(spec)
    if packed.numel() != needed or packed.dtype is not torch.float32:
        raise InputError(
            f"the packed weights are {packed.numel()} numbers of {packed.dtype}; {kernel.name} on "
            f"this machine reads {needed} of torch.float32. Pack them with this kernel, here."
        )
    x, x_pixel = _pixels(x)
    if kernel.reads_dense and x_pixel != spec.c:
        x, x_pixel = to_format(x, Format.CHANNELS_LAST), spec.c
    residual_pixel = 0
    if residual is not None:
        if tuple(residual.shape) != shape:
            raise InputError(f"the residual is {tuple(residual.shape)}; the result is {shape}.")
        residual, residual_pixel = _pixels(residual)
        if kernel.dense and residual_pixel != spec.k:
            residual, residual_pixel = to_format(residual, Format.CHANNELS_LAST), spec.k
    call = _call(kernel, x_pixel, residual_pixel, isas.host().name, torch.get_num_threads())
    buffers = {"x": x, "y": y, "packed": packed.contiguous()}
    call(buffers if residual is None else {**buffers, "residual": residual})
    return y


def _pixels(tensor: Tensor) -> tuple[Tensor, int]:
    """`tensor` as float32 channels last, copied only if it is not, and its pixel stride."""
    tensor = tensor.float()
    view = view_of(tensor)
    if view is None:
        tensor = to_format(tensor, Format.CHANNELS_LAST)
        return tensor, tensor.shape[1]
    return tensor, view.pixel


@lru_cache(maxsize=4096)
def _call(
    kernel: ConvKernel, x_pixel: int, residual_pixel: int, isa: str, threads: int
) -> Invocation:
    spec = kernel.spec
    x = View("x", (spec.n, spec.c, spec.h, spec.w), x_pixel)
    y = View("y", (spec.n, spec.k, spec.out_h, spec.out_w), spec.k)
    residual = View("residual", y.shape, residual_pixel) if residual_pixel else None
    packed = View("packed", (1, 1, 1, 1), 1)
    return Invocation.of(kernel.steps(x, y, packed, residual), threads)
