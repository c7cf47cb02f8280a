"""What tests may ask of this machine, or of what the environment lets torch use of it."""

import pytest
import torch


def computes(dtype: torch.dtype) -> bool:
    """Whether torch convolves in `dtype`; oneDNN held below AVX-512 may refuse bfloat16."""
    try:
        for dims in (2, 3):
            image = torch.zeros(2, 8, *[8] * dims, dtype=dtype)
            weight = torch.zeros(8, 8, *[3] * dims, dtype=dtype)
            (torch.conv2d if dims == 2 else torch.conv3d)(image, weight)
    except RuntimeError:
        return False
    return True


def needing(dtype: torch.dtype | None, parameter: object = None):
    """A parameter, or else `dtype`, of a test that is skipped if torch cannot convolve in it."""
    unable = dtype is not None and not computes(dtype)
    reason = f"torch does not convolve in {dtype} here"
    return pytest.param(
        dtype if parameter is None else parameter, marks=pytest.mark.skipif(unable, reason=reason)
    )
