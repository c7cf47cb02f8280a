"""Weights that are rarely read lie in a file: tensors like any other that take no memory."""

import copy
import ctypes
import gc
import io
import mmap
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import nhwc
from nhwc._bench.peak import resident_bytes
from nhwc.machine import host_memory as release
from nhwc.machine.host_memory import apart, shelve
from nhwc.optimized.stamp import Stamp

from ..optimizing import force, runs_program

MB = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def weight(numbers=4 * MB):
    return torch.randn(numbers // 1024, 1024)


@pytest.fixture
def shelved(tmp_path):
    """A parameter that lies in a file, and what is in it."""
    parameter = nn.Parameter(weight())
    values = parameter.detach().clone()
    assert shelve([parameter], tmp_path) == [parameter]
    return parameter, values


def test_the_memory_is_released_and_nothing_is_left_in_the_folder(tmp_path):
    tensors = [weight(), weight().to(torch.bfloat16), torch.randn(256, 256, 3, 3, 3)]
    tensors.append(torch.randn(1024, 512, 3, 3).to(memory_format=torch.channels_last))
    expected = [(tensor.clone(), tensor.stride()) for tensor in tensors]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    assert shelve(tensors, tmp_path) == tensors
    assert all(storage() is None for storage in storages)
    for tensor, (values, strides) in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, values)
        assert tensor.stride() == strides
    assert not [*tmp_path.iterdir()]


@on_linux
def test_what_is_not_read_takes_no_memory(tmp_path):
    release.trim()
    before = resident_bytes()
    tensor = weight(16 * MB)
    assert shelve([tensor], tmp_path) == [tensor]
    # What libraries have told malloc decides whether it gives memory back by itself.
    release.trim()
    assert resident_bytes() - before < 16 * MB
    tensor.sum()
    assert resident_bytes() - before >= 60 * MB


@pytest.mark.parametrize(
    "tensor",
    [
        weight(),
        torch.randn(64, 64, 5, 5).to(memory_format=torch.channels_last),
        weight().to(torch.bfloat16),
        weight().t()[::2],
        torch.randn(3),
        torch.arange(1 << 20),
        torch.eye(512).to_sparse(),
        torch.randn(4, 1 << 16, device="meta"),
    ],
)
def test_a_copy_apart_is_the_copy_that_clone_makes(tensor):
    copy, expected = apart(tensor), tensor.clone()
    assert (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device)
    if tensor.layout is torch.strided:
        assert copy.stride() == expected.stride()
    if tensor.device.type != "meta":
        assert torch.equal(copy.to_dense(), expected.to_dense())
        copy.zero_()
        assert torch.equal(tensor.to_dense(), expected.to_dense())


@on_linux
def test_a_copy_apart_leaves_no_gap(tmp_path):
    tensor = weight(MB)
    # A large tensor that is gone teaches malloc to keep what others leave.
    torch.ones(6 * MB)
    release.trim()
    before = resident_bytes()
    between = []
    copies = []
    for _ in range(16):
        copies.append(apart(tensor))
        between.append(tensor[:32].clone())
    assert resident_bytes() - before >= 60 * MB
    copies.clear()
    assert resident_bytes() - before < 8 * MB


def test_a_copy_apart_is_no_file_that_memory_could_be_taken_from():
    copy = apart(weight())
    assert release.in_memory(copy) is copy


@pytest.mark.parametrize("shape", [(4096, 1024), (1 << 21,), ((1 << 21) + 5, 1)])
def test_what_comes_back_from_a_file_is_the_same(shape, tmp_path):
    weight = torch.randn(shape)
    values = weight.clone()
    assert shelve([weight], tmp_path)
    copy = release.in_memory(weight)
    assert copy is not weight
    assert copy.stride() == weight.stride()
    assert torch.equal(copy, values)


@on_linux
def test_a_file_is_read_a_part_at_a_time(tmp_path, monkeypatch):
    tensor, held, unread = weight(16 * MB), [], release.unread
    assert shelve([tensor], tmp_path)

    def noting(tensors):
        # The peak that the system tells leaves out what was read of a file.
        held.append(resident_bytes())
        unread(tensors)

    monkeypatch.setattr(release, "unread", noting)
    before = resident_bytes()
    copy = release.in_memory(tensor)
    assert max(held) - before < 1.5 * copy.nbytes


@on_linux
def test_a_mapping_may_end_while_others_are_looked_through(tmp_path, monkeypatch):
    """The garbage collector ends one in the middle of a loop, and so may another thread."""
    monkeypatch.setattr(release, "_files", dict.fromkeys(range(5000), 0))
    tensor, before = weight(), gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        gone = [weight()]
        assert shelve(gone, tmp_path)
        gone.append(gone)
        del gone
        # The collector runs when a loop over all files has made this many pairs.
        gc.set_threshold(gc.get_count()[0] + 1000)
        gc.enable()
        assert release.in_memory(tensor) is tensor
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    assert len(release._files) == 5000


def test_what_something_else_holds_stays_where_it_is(tmp_path):
    shared, part, alone = weight(), weight(8 * MB), weight()
    view, part = shared[0], part[::2]
    places = shared.data_ptr(), part.data_ptr()
    assert shelve([shared, part, alone, alone], tmp_path) == [alone]
    assert places == (shared.data_ptr(), part.data_ptr())
    shared.zero_()
    assert not view.any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, 64),
        torch.zeros(4 * MB).expand(4, -1),
        torch.zeros(4 * MB)[: 2 * MB].expand(2, -1).data,
        torch.eye(4096).to_sparse(),
        torch.empty(4 * MB, device="meta"),
        torch.zeros(4 * MB).share_memory_(),
        torch.zeros(4 * MB, dtype=torch.int32),
    ],
    ids=["small", "expanded", "expanded in its own memory", "sparse", "meta", "shared", "integers"],
)
def test_what_is_no_plain_large_weight_stays_where_it_is(tensor, tmp_path):
    assert shelve([tensor], tmp_path) == []


def test_it_can_be_written_to_copied_and_pickled(shelved):
    parameter, values = shelved
    twin = copy.deepcopy(parameter)
    with torch.no_grad():
        parameter.add_(1)
    assert torch.equal(parameter, values + 1)
    assert torch.equal(twin, values)
    assert torch.equal(pickle.loads(pickle.dumps(parameter)), values + 1)
    assert torch.equal(parameter.double(), (values + 1).double())
    file = io.BytesIO()
    torch.save({"weight": parameter}, file)
    assert len(file.getvalue()) < 1.1 * values.nbytes
    parameter.share_memory_()
    assert torch.equal(parameter, values + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_its_own(shelved):
    parameter, values = shelved
    here, there = parameter.detach().numpy(), values.numpy()
    child = os.fork()
    if child == 0:
        # Without torch, whose threads no fork survives.
        right = (here == there).all()
        here[:] = 0
        os._exit(not right)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(parameter, values)


def test_where_nothing_can_be_written_it_stays_in_memory(tmp_path):
    tensor = weight()
    place = tensor.data_ptr()
    (tmp_path / "file").touch()
    assert shelve([tensor], tmp_path / "file" / "folder") == []
    assert tensor.data_ptr() == place


@on_linux
def test_a_disk_that_is_full_costs_nothing_but_the_gain(tmp_path):
    code = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from nhwc.machine.host_memory import shelve\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "x = torch.ones(1 << 22); assert shelve([x], Path(sys.argv[1])) == []; assert x.all()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert not [*tmp_path.iterdir()]


@on_linux
def test_files_that_are_in_memory_themselves_are_not_used(tmp_path, monkeypatch):
    tensor, device = weight(), tmp_path.stat().st_dev
    line = "30 1 {}:{} / /x rw,nosuid shared:2 - {} none rw,size=1g\n"
    number = os.major(device), os.minor(device)
    for kind, moved in (("tmpfs", []), ("ext4", [tensor])):
        text = line.format(*number, kind)
        monkeypatch.setattr(release.Path, "read_text", lambda _, text=text: text)
        assert shelve([tensor], tmp_path) == moved


def lies_in_a_file(tensor):
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith("(deleted)")
    return False


@pytest.fixture(scope="module")
def packed():
    """An optimized model with one large weight, which its kernel has in another form."""
    from nhwc.plan import measuring
    from nhwc.plan.evidence import RivalTime

    def without_torch(*given):
        """Torch's own kernel would read the weight where it lies."""
        slow = RivalTime(1.0, 1.0, 1)
        return {i: slow if i.name == "torch" else one for i, one in timed(*given).items()}

    timed = measuring.time_layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "time_layer", without_torch)
        net = nn.Sequential(nn.Conv2d(512, 512, 3, padding=1)).eval()
        x = torch.randn(1, 512, 6, 6)
        yield net, x, force(net, x, remeasure=True)


@on_linux
@torch.no_grad()
def test_weights_that_were_packed_are_shelved_and_serve_other_shapes(packed, tmp_path):
    net, x, fast = packed
    assert runs_program(fast, x)
    assert lies_in_a_file(fast.portable.get_submodule("0").weight)
    assert not lies_in_a_file(net[0].weight)
    for image in (x, torch.randn(2, 512, 5, 7)):
        torch.testing.assert_close(fast(image), net(image), rtol=1e-4, atol=1e-4)


@on_linux
@torch.no_grad()
def test_a_loaded_model_needs_its_file_no_more(packed, tmp_path):
    net, x, fast = packed
    file = tmp_path / "model.nhwc"
    nhwc.save(fast, file)
    loaded = nhwc.load(file)
    assert runs_program(loaded, x)
    assert lies_in_a_file(loaded.portable.get_submodule("0").weight)
    os.truncate(file, 0)
    assert torch.equal(loaded.portable(x), fast.portable(x))
    for image in (x, torch.randn(2, 512, 5, 7)):
        torch.testing.assert_close(loaded(image), net(image), rtol=1e-4, atol=1e-4)
    loaded.portable.get_submodule("0").weight.mul_(2)
    bias = net[0].bias.view(-1, 1, 1)
    torch.testing.assert_close(loaded(x) - bias, 2 * (net(x) - bias), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_without_a_disk_a_loaded_model_is_in_memory(packed, tmp_path, monkeypatch):
    _, x, fast = packed
    nhwc.save(fast, tmp_path / "model.nhwc")
    monkeypatch.setattr(release, "_is_memory", lambda folder: True)
    loaded = nhwc.load(tmp_path / "model.nhwc")
    assert all(p.untyped_storage().resizable() for p in loaded.portable.parameters())
    assert torch.equal(loaded.portable(x), fast.portable(x))


@on_linux
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no MKL here")
def test_what_mkl_keeps_goes_back_too(monkeypatch):
    matrix = torch.ones(700, 700, dtype=torch.float64)
    product = matrix @ matrix
    with monkeypatch.context() as patch:
        patch.setattr(release, "_torch", lambda: None)
        release.trim()
    before = resident_bytes()
    release.trim()
    assert before - resident_bytes() > MB
    assert torch.equal(matrix @ matrix, product)


@torch.no_grad()
def test_new_values_in_a_shelved_weight_are_noticed(packed):
    net, x, fast = packed
    twin = copy.deepcopy(fast)
    twin.portable.get_submodule("0").weight.mul_(0.5)
    other = copy.deepcopy(net)
    other[0].weight.mul_(0.5)
    torch.testing.assert_close(twin(x), other(x), rtol=1e-4, atol=1e-4)
    kept = fast.portable.get_submodule("0").weight.clone()
    fast.portable.get_submodule("0").weight.mul_(0.5)
    torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-4)
    fast.load_state_dict({**fast.state_dict(), "portable.0.weight": kept})
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)


def populates():
    """Whether the system loads single pages of a file, as Linux does since 5.14."""
    page = torch.zeros(3 * mmap.PAGESIZE, dtype=torch.uint8)
    first = -(-page.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = ctypes.c_size_t(mmap.PAGESIZE)
    madvise = getattr(ctypes.CDLL(None), "madvise", lambda *_: -1)
    return madvise(ctypes.c_void_p(first), size, release._POPULATE_WRITE) == 0


@on_linux
@pytest.mark.skipif(not populates(), reason="needs Linux 5.14")
def test_a_stamp_does_not_bring_back_what_lies_in_a_file(tmp_path):
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(32))).requires_grad_(False)
    assert shelve(net.parameters(), tmp_path)
    release.unread(net.parameters())
    before = resident_bytes()
    stamp = Stamp(net)
    assert stamp.holds()
    # Each page that is read from a file brings its neighbours, here all of 32 MB.
    assert resident_bytes() - before < 4 * MB
    net[7].weight.data.mul_(2)
    assert not stamp.holds()
