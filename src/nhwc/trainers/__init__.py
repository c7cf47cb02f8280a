"""Channels last in training loops of others: a module for each, which imports its package.

    nhwc.trainers.lightning          ChannelsLast(), a callback of lightning
    nhwc.trainers.pytorch_lightning  the same for those who import pytorch_lightning
    nhwc.trainers.transformers       ChannelsLast(), a callback of Hugging Face's Trainer
    nhwc.trainers.accelerate         ChannelsLast(accelerator).prepare(model, optimizer, ...)

Each converts the model before it is wrapped, gives it batches in channels last, watches the first
step, and says in a line or two what it found.
"""
