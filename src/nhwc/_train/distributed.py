"""One process or many: the group, the wrapping of the model, the errors of lost processes."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ..errors import InputError, ProcessLost
from ..formats import Format, convert_
from ..models.trees import some
from ..shown import first_line


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are; 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextlib.contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Join the group that torchrun describes, if any, and leave it after; yield its device.

    >>> with process_group(torch.device("cpu")) as device:
    ...     device, rank_and_world()
    (device(type='cpu'), (0, 1))
    """
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield device
        return
    backend = "gloo"
    if device.type == "cuda":
        # gloo runs beside nccl so that asking whether to stop does not wait for the GPU.
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", _local_gpu())
        torch.cuda.set_device(device)
    # DistributedDataParallel would import this with a group, which its functions then never free.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        store, rank, world = next(rendezvous("env://"))
        dist.init_process_group(backend, store=_fresh(store), rank=rank, world_size=world)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes did not find each other ({_first_line(error)}). Start them with "
            "torchrun, or unset WORLD_SIZE to train in one process."
        ) from error
    try:
        yield device
        # A process that leaves early closes connections that others may still be reading from.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # The group's threads end when the last model that holds it is freed. A thread that frees a
    # tensor while Python shuts down aborts the process.
    gc.collect()


def _fresh(store: Store) -> Store:
    """Return a part of `store` that no earlier start has written to.

    After a restart torchrun's store on a single machine still has the addresses of processes that
    are gone, and gloo tries to connect to them. Machines may count their restarts differently, so
    among several the store stays as torchrun made it.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return store
    return PrefixStore(f"start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _local_gpu() -> int:
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise InputError(
            f"process {local} of this machine has no GPU: there are {there}. "
            f"Use torchrun --nproc-per-node {there}."
        )
    return local


def parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap `model` for this group: gradients are averaged over the processes."""
    if rank_and_world()[1] == 1:
        return model
    for path, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and device.type == "cpu":
            raise InputError(
                f"{path or 'the model'} is a SyncBatchNorm, which torch has for several processes "
                "on GPUs alone. Train in one process, or with BatchNorm."
            )
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def check_averaged(model: nn.Module) -> None:
    """Refuse gradients that DistributedDataParallel has not averaged: it waits for all of them.

    Without this, torch raises its own error in the next forward pass, after an update in which each
    process took its own gradients.
    """
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        if module.find_unused_parameters or module.static_graph:
            continue
        named = module.module.named_parameters()
        awaited = [(n, p) for n, p in named if n not in module.parameters_to_ignore]
        idle = [name for name, p in awaited if p.requires_grad and p.grad is None]
        if idle:
            raise InputError(
                f"{some(idle)} got no gradient, and several processes wait for that of each "
                "parameter. Set requires_grad to False there, or train in one process."
            )


def shard_(model: nn.Module) -> nn.Module:
    """Spread the parameters of `model` over the group's processes (FSDP2), layer by layer.

    FSDP2 refuses parameters that are not contiguous, so the stored weights are made so.
    Activations stay channels last: one such operand is enough for a convolution. Build the
    optimizer afterwards, over the sharded parameters.
    """
    from torch.distributed.fsdp import fully_shard

    convert_(model, Format.CONTIGUOUS)
    for module in list(model.modules()):
        if module is not model and next(module.parameters(recurse=False), None) is not None:
            fully_shard(module)
    fully_shard(model)
    return model


def sum_over_processes(values: Tensor) -> Tensor:
    """Return the sum of `values` over all processes; each gets it."""
    if rank_and_world()[1] > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in any process: all get the same answer, at the same step."""
    if rank_and_world()[1] == 1:
        return flag
    # Use the CPU where the group can: reading a flag from the GPU would wait for the GPU.
    device = "cpu" if "cpu:" in str(dist.get_backend_config()) else "cuda"
    return bool(sum_over_processes(torch.tensor(float(flag), device=device)))


def agree_on_buffers_(model: nn.Module) -> None:
    """Give all processes the first one's buffers: each has gathered other batch-norm statistics."""
    if rank_and_world()[1] > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


@contextlib.contextmanager
def lost_processes_named() -> Iterator[None]:
    """Turn the many errors that a lost process causes into one that says so."""
    try:
        yield
    except RuntimeError as error:
        rank, world = rank_and_world()
        if world == 1 or not speaks_of_peers(error):
            raise
        raise ProcessLost(
            f"process {rank} of {world} lost another one and stops; that one's own message is "
            "above or in its log. Start again with --resume, or let torchrun do so with "
            f"--max-restarts ({_first_line(error)})"
        ) from error


def said_by_first(text: str, *, wait: bool = True) -> bool:
    """Whether torchrun's first process ends with the same words, so that this one need not.

    The processes compare their words in torchrun's own store, which outlives them; without it
    each one speaks. Call this last: from then on the process ignores SIGTERM.

    >>> said_by_first("no such folder")
    False
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    key = f"last_words_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    # Processes end together, but on a busy machine one may be seconds behind.
    patience = timedelta(seconds=30)
    try:
        store, rank, _ = next(rendezvous("env://", timeout=patience))
        if rank == 0:
            store.set(key, text)
        if rank == 0 or not wait:
            return False
        store.wait([key], patience)
        return bool(store.get(key).decode() == text)
    except (RuntimeError, ValueError):
        return False


_PEER_WORDS = ("gloo", "NCCL", "peer", "Broken pipe", "TCPStore", "Timed out waiting")


def speaks_of_peers(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(word in text for word in _PEER_WORDS)


def _first_line(error: Exception) -> str:
    return first_line(error)[:160]
