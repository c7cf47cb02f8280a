"""Diffusion with diffusers' U-Net and VAE: a few steps from noise to an image.

    python recipes/diffusion.py

A pipeline reads the configuration of its U-Net and gives it names with its arguments, so the U-Net
stays what it is, behind torch.compile. The VAE's decoder is a module that is only called: it can be
exchanged. In a pipeline: pipe.unet = torch.compile(pipe.unet, backend="nhwc").
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor, nn

import nhwc
from telling import small_asked, tell_audit, tell_gain

STEPS = 4


def models(small: bool) -> tuple[UNet2DConditionModel, AutoencoderKL]:
    """A U-Net and a VAE with random weights; from_pretrained gives others."""
    widths, groups, words = ((8, 16), 4, 8) if small else ((128, 256), 32, 256)
    unet = UNet2DConditionModel(
        sample_size=8 if small else 32,
        layers_per_block=1,
        block_out_channels=widths,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=words,
        attention_head_dim=4,
        norm_num_groups=groups,
    )
    kinds = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    vae = AutoencoderKL(block_out_channels=widths, norm_num_groups=groups, **kinds)
    return unet.eval(), vae.eval()


@torch.no_grad()
def drawn(unet: nn.Module, vae: AutoencoderKL, noise: Tensor, text: Tensor) -> Tensor:
    """An image from noise, as a pipeline makes it."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    latent = noise
    for moment in scheduler.timesteps:
        guess = unet(latent, moment, encoder_hidden_states=text, return_dict=False)[0]
        latent = scheduler.step(guess, moment, latent, return_dict=False)[0]
    return vae.decode(latent, return_dict=False)[0]


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    unet, vae = models(small)
    noise = torch.randn(1, 4, unet.config.sample_size, unet.config.sample_size)
    text = torch.randn(1, 5, unet.config.cross_attention_dim)

    tell_audit("U-Net", nhwc.audit(unet, noise, torch.tensor(7), text))
    tell_audit("VAE's decoder", nhwc.audit(vae.decoder, noise))
    wanted = drawn(unet, vae, noise, text)

    backend = nhwc.backend()
    planned = torch.compile(unet, backend=backend)
    vae.decoder = nhwc.optimize(vae.decoder, noise)
    tell_gain("VAE's decoder", vae.decoder)
    found = drawn(planned, vae, noise, text)
    for graph in backend.graphs:
        gains = ", ".join(f"{report.comparison.ratio:.2f}x" for report in graph.reports)
        print(f"U-Net: a graph of {graph.operators} operators, {gains or graph.reason}")
    error = ((found - wanted).norm() / wanted.norm()).item()
    print(f"the image after {STEPS} steps differs by {error:.1e} of itself")
    return 0 if error < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
