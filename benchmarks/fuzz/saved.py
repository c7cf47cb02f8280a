"""The saved files that are changed, taken apart."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .changes import NUMBERS


@dataclass(frozen=True)
class Saved:
    """A valid file, taken apart: its header, and its tensors' bytes."""

    name: str
    header: dict[str, Any]
    blobs: tuple[bytes, ...]

    @classmethod
    def of(cls, path: Path) -> Saved:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data, 12)
        header = json.loads(data[60 : 60 + length])
        blobs, at = [], 60 + length
        for entry in header["tensors"]:
            size = _bytes_of(entry)
            at += -at % 64
            blobs.append(data[at : at + size])
            at += size
        return cls(path.stem, header, tuple(blobs))

    def with_indices(self, draw: random.Random) -> Saved:
        """The same file, whose tables of indices name other places."""
        blobs = list(self.blobs)
        entries = zip(self.header["tensors"], blobs, strict=True)
        whole = [i for i, (one, blob) in enumerate(entries) if one["dtype"] == "int64" and blob]
        if not whole:
            return self
        place = draw.choice(whole)
        numbers = list(struct.unpack(f"<{len(blobs[place]) // 8}q", blobs[place]))
        known = [number for number in NUMBERS if -(1 << 63) <= number < 1 << 63]
        numbers[draw.randrange(len(numbers))] = draw.choice(known)
        blobs[place] = struct.pack(f"<{len(numbers)}q", *numbers)
        header = json.loads(json.dumps(self.header))
        header["tensors"][place]["crc32"] = zlib.crc32(blobs[place])
        return Saved(self.name, header, tuple(blobs))

    def packed(self, header: Any) -> bytes:
        """The bytes of a file with another header, and all its checksums."""
        text = json.dumps(header).encode("utf-8", "surrogatepass")
        end = 60 + len(text)
        body = []
        for blob in self.blobs:
            gap = b"\0" * (-end % 64)
            body += [gap, blob]
            end += len(gap) + len(blob)
        fixed = struct.pack("<8sIQQ", b"\x89NHWC\r\n\x1a", 1, len(text), end)
        return fixed + hashlib.sha256(fixed + text).digest() + text + b"".join(body)


def _bytes_of(entry: dict[str, Any]) -> int:
    size = {"float32": 4, "int64": 8, "float16": 2, "float64": 8}[entry["dtype"]]
    for dim in entry["shape"]:
        size *= dim
    return size


def save_models(folder: Path) -> None:
    """Files of several kinds: all kinds of steps, arguments, layers and outputs."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import nhwc

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.scale = nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x: Any, gain: float = 2.0) -> Any:
            y = F.relu(self.norm(self.conv(x)) * self.scale) + gain
            y = F.interpolate(y, scale_factor=2.0, mode="nearest")[:, :, 1:, ...]
            y = y.to(torch.float32, memory_format=torch.channels_last)
            flat = torch.flatten(y, start_dim=1)
            return {"flat": flat, "rest": [y.sum(dim=(2, 3)), (y.shape[0], y.dim())]}

    class Sized(nn.Module):
        def forward(self, x: Any) -> Any:
            n, c, h, w = x.shape
            x = x.view(n, c, h * w).transpose(1, 2).softmax(dim=-1)
            return torch.cat([x, torch.zeros(n, 1, c)], dim=1).reshape(n, -1)

    class Windows(nn.Module):
        """Attention in shifted windows, with a bias that a table of indices picks."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Conv2d(3, 16, 1), nn.LayerNorm(16)
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
            self.bias = nn.Parameter(torch.randn(49, 2))
            self.register_buffer("index", torch.randint(0, 49, (16, 16)))

        def forward(self, x: Any) -> Any:
            y = self.embed(x).permute(0, 2, 3, 1)
            z = torch.roll(self.norm(y), (-2, -2), (1, 2)).view(1, 2, 4, 2, 4, 16)
            z = z.permute(0, 1, 3, 2, 4, 5).reshape(4, 16, 16)
            q, k, v = self.qkv(z).view(4, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            bias = self.bias[self.index.view(-1)].view(16, 16, 2).permute(2, 0, 1)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
            z = self.out(z.transpose(1, 2).reshape(4, 16, 16)).view(1, 2, 2, 4, 4, 16)
            z = torch.roll(z.permute(0, 1, 3, 2, 4, 5).reshape(1, 8, 8, 16), (2, 2), (1, 2))
            return (y + z).permute(0, 3, 1, 2)

    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv3d(1, 8, 3, padding=1), nn.ConvTranspose3d(8, 4, 2, 2)
            self.norm = nn.InstanceNorm3d(8, affine=True)

        def forward(self, x: Any) -> Any:
            y = F.max_pool3d(F.relu(self.norm(self.one(x.unsqueeze(1)))), (1, 2, 2))
            y = torch.cat([self.two(y), F.pad(self.two(y).flip(3), (0, 0, 1, -1))], dim=1)
            return F.interpolate(y, scale_factor=2.0), F.adaptive_avg_pool3d(y, (1, 2, 2))

    class Detector(nn.Module):
        """Places that the best scores name are read from an image, and sampled between pixels."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.score = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
            self.grid = nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            y = F.silu(self.body(x))
            score, place = self.score(y).flatten(1).topk(5)
            found = y.flatten(2).gather(2, place.unsqueeze(1).expand(-1, 8, -1)).transpose(1, 2)
            grid = self.grid(found).tanh().unsqueeze(2)
            part = F.grid_sample(y, grid, align_corners=False)
            shuffled = F.pixel_shuffle(F.channel_shuffle(y, 2), 2)
            return score, part, shuffled, F.fold(F.unfold(y, 3), (8, 8), 3)

    class Signal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv1d(3, 8, 5, stride=2, padding=2), nn.PReLU(8)
            self.norm, self.mix = nn.GroupNorm(2, 8), nn.Linear(16, 4)

        def forward(self, x: Any) -> Any:
            y = self.norm(self.act(self.conv(x.flatten(2))))
            both = torch.stack([F.max_pool1d(y, 2), F.avg_pool1d(y, 2)], 2)
            maps = torch.einsum("ncil,ncjl->nij", both, both).softmax(-1)
            return self.mix(both.reshape(1, 16, -1).transpose(1, 2)), maps, F.normalize(y)

    tower = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    models = {
        "mixed": Mixed(),
        "sized": Sized(),
        "tower": nn.Sequential(tower, nn.Flatten(), nn.Linear(8, 4)),
        "windows": Windows(),
        "volume": Volume(),
        "detector": Detector(),
        "signal": Signal(),
        "recurrent": nn.Sequential(nn.Flatten(2), nn.LSTM(64, 4, batch_first=True)),
    }
    torch.manual_seed(0)
    with torch.no_grad():
        for name, model in models.items():
            nhwc.save(nhwc.optimize(model.eval(), torch.randn(1, 3, 8, 8)), folder / f"{name}.nhwc")
            saved = Saved.of(folder / f"{name}.nhwc")
            header = saved.header | {"planned": [["1x3x8x8 float32"]]}
            (folder / f"{name}.nhwc").write_bytes(saved.packed(header))
