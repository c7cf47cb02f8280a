"""`convert_` in a real two-process run: the strides that torch's buckets want, 1x1 weights too."""

from pathlib import Path

import pytest
import torch

from .training_nets import torchrun

SCRIPT = Path(__file__).with_name("ddp_formats.py")


def step(tmp_path, format, *, dimensions=4, bucket_view=True, autocast=False):
    """The two processes' results."""
    output = tmp_path / f"{format}-{dimensions}"
    done = torchrun(SCRIPT, output, format, dimensions, bucket_view, autocast)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{output}.{rank}", weights_only=True) for rank in (0, 1)], done.stderr


@pytest.mark.parametrize(
    "settings",
    [{}, {"bucket_view": False}, {"autocast": True}, {"dimensions": 5}],
    ids=["bucket-view", "copies", "bfloat16", "volumes"],
)
def test_gradients_keep_the_strides_of_converted_weights(tmp_path, settings):
    results, said = step(tmp_path, "channels_last", **settings)
    assert "Grad strides do not match" not in said
    for result in results:
        assert result["warnings"] == []
        assert [n for n, (own, grad) in result["strides"].items() if own != grad] == []


def test_the_gradients_are_those_of_contiguous_weights(tmp_path):
    last, _ = step(tmp_path, "channels_last")
    plain, _ = step(tmp_path, "contiguous")
    for name, expected in plain[0]["gradients"].items():
        for result in (*last, plain[1]):
            torch.testing.assert_close(result["gradients"][name], expected, rtol=1e-4, atol=1e-6)


def test_what_contiguous_leaves_of_1x1_weights_does_warn(tmp_path):
    """The report this is about: `.contiguous(channels_last)` does not restride a 1x1 weight."""
    script = SCRIPT.read_text().replace(
        'net = convert_(plain() if dimensions == "4" else volume(), Format(format))',
        "net = plain()\n    for p in net.parameters():\n        if p.ndim == 4:\n"
        "            p.data = p.data.contiguous(memory_format=torch.channels_last)",
    )
    naive = tmp_path / "naive.py"
    naive.write_text(script)
    done = torchrun(naive, tmp_path / "naive", "channels_last", 4, True, False)
    assert done.returncode == 0, done.stderr
    result = torch.load(f"{tmp_path / 'naive'}.0", weights_only=True)
    assert any("Grad strides do not match" in warning for warning in result["warnings"])
