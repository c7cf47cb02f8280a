"""Versions of torch's transformer layers that can be traced.

Torch's own code asks of its inputs whether it may take a shortcut, a single C++ call that computes
the same. The versions here leave out that question and the masks, so they have no branches.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .rearranging import einops_layers


def _encoder_layer(layer: nn.TransformerEncoderLayer, src: Tensor) -> Tensor:
    if layer.norm_first:
        src = src + layer._sa_block(layer.norm1(src), None, None)
        return src + layer._ff_block(layer.norm2(src))
    src = layer.norm1(src + layer._sa_block(src, None, None))
    return layer.norm2(src + layer._ff_block(src))  # type: ignore[no-any-return]


def _encoder(encoder: nn.TransformerEncoder, src: Tensor) -> Tensor:
    for layer in encoder.layers:
        src = layer(src)
    return src if encoder.norm is None else encoder.norm(src)


def _decoder_layer(layer: nn.TransformerDecoderLayer, tgt: Tensor, memory: Tensor) -> Tensor:
    return nn.TransformerDecoderLayer.forward(layer, tgt, memory)


def _decoder(decoder: nn.TransformerDecoder, tgt: Tensor, memory: Tensor) -> Tensor:
    for layer in decoder.layers:
        tgt = layer(tgt, memory)
    return tgt if decoder.norm is None else decoder.norm(tgt)


def _transformer(model: nn.Transformer, src: Tensor, tgt: Tensor) -> Tensor:
    return model.decoder(tgt, model.encoder(src))  # type: ignore[no-any-return]


def _without_masks(kind: type[nn.Module], plain: Callable[..., Tensor]) -> type[nn.Module]:
    """Make a subclass of `kind` that runs `plain` if it is called without masks."""
    signature = inspect.signature(kind.forward)
    tensors = list(inspect.signature(plain).parameters)[1:]

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(self, *args, **kwargs).arguments
        masks = [value for name, value in given.items() if name not in ("self", *tensors)]
        if any(mask is not None and mask is not False for mask in masks):
            return kind.forward(self, *args, **kwargs)  # type: ignore[no-any-return]
        return plain(self, *(given[name] for name in tensors))

    return type(kind.__name__, (kind,), {"forward": forward})


_SPELLED_OUT: dict[type[nn.Module], type[nn.Module]] = {
    kind: _without_masks(kind, plain)
    for kind, plain in (
        (nn.TransformerEncoderLayer, _encoder_layer),
        (nn.TransformerEncoder, _encoder),
        (nn.TransformerDecoderLayer, _decoder_layer),
        (nn.TransformerDecoder, _decoder),
        (nn.Transformer, _transformer),
    )
}


@contextlib.contextmanager
def spelled_out(root: nn.Module) -> Iterator[None]:
    """Let layers of `root` run other code inside the `with` block: transformers' that of this file,
    einops' the functions of their names.
    """
    others = _SPELLED_OUT | einops_layers()
    found = [(m, type(m)) for m in root.modules() if type(m) in others]
    for module, kind in found:
        module.__class__ = others[kind]
    try:
        yield
    finally:
        for module, kind in found:
            module.__class__ = kind


def is_spelled_out(module: nn.Module) -> bool:
    return type(module) in _SPELLED_OUT.values()
