"""Lines of oneDNN's profile, as its versions write them."""

import pytest

from nhwc.formats import Format
from nhwc.watch.calls import Call, CallSite, TensorSpec
from nhwc.watch.onednn import is_told, mark_of, of_others, primitives_of

LINES = {
    "1.8": b"dnnl_verbose,exec,cpu,reorder,simple:any,undef,"
    b"src_f32::blocked:abcd:f0 dst_f32::blocked:aBcd16b:f0,,,2x32x14x14,0.25\n",
    "2.7": b"onednn_verbose,exec,cpu,reorder,jit:uni,undef,"
    b"src_f32::blocked:abcd:f0 dst_f32::blocked:aBcd16b:f0,attr-scratchpad:user ,,"
    b"2x32x14x14,0.25\n",
    "3.1, time stamp": b"onednn_verbose,1693533460193.346924,exec,cpu,reorder,jit:blk,undef,"
    b"src_f32::blocked:abcd::f0 dst_f32::blocked:aBcd16b::f0,,,2x32x14x14,0.25\n",
    "3.3": b"onednn_verbose,primitive,exec,cpu,reorder,jit:blk,undef,"
    b"src_f32:p:blocked:abcd::f0 dst_f32::blocked:aBcd16b::f0,,,2x32x14x14,0.25\n",
    "3.12": b"onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,"
    b"src:f32::blocked:abcd:6272x196x14x1:f0 dst:f32::blocked:aBcd16b::f0,attr-scratchpad:user,,"
    b"2x32x14x14,0.25\n",
}
CONV = (
    b"onednn_verbose,v1,primitive,exec,cpu,convolution,jit:avx2,forward_training,"
    b"src:f32:a:blocked:aBcd16b::f0 wei:f32:a:blocked:ABcd16b16a::f0 bia:f32:a:blocked:a::f0 "
    b"dst:f32:a:blocked:aBcd16b::f0,,alg:convolution_direct,mb2_ic32oc32_ih14oh14kh3,0.5\n"
)
OTHERS = (
    b"onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2\n",
    b"onednn_verbose,v1,primitive,info,template:operation,engine,primitive,exec_time\n",
    b"onednn_verbose,v1,primitive,create:cache_miss,cpu,reorder,jit:blk,undef,"
    b"src:f32::blocked:abcd::f0 dst:f32::blocked:acdb::f0,,,2x32x14x14,0.25\n",
    b"onednn_verbose,v1,primitive,exec:start,cpu,reorder,jit:blk,undef,"
    b"src:f32::blocked:abcd::f0 dst:f32::blocked:acdb::f0,,,2x32x14x14\n",
    b"onednn_verbose,v9,what is not known,exec,yet\n",
    b"onednn_verbose,primitive,exec,cpu,reorder,jit:blk,undef,src,,,cut off,\n",
    b"exec,cpu,reorder\n",
    b"\n",
)


def reorder(source: str, target: str, shape: str) -> bytes:
    return (
        f"onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,src:f32::blocked:{source}::f0 "
        f"dst:f32::blocked:{target}::f0,,,{shape},0.25\n"
    ).encode()


def call(image=(2, 32, 14, 14), weight=(32, 32, 3, 3), index=7) -> Call:
    def spec(shape, source):
        return TensorSpec(shape, (), "float32", Format.CONTIGUOUS, 0, source)

    inputs = (spec(image, 0), spec(weight, None))
    site = CallSite("stem.conv", "Conv2d", "model.py", 3, "")
    return Call(index, "conv2d", False, site, inputs, (spec(image, 7),), True)


def marked(*lines: bytes, of: Call) -> bytes:
    return b"".join(lines) + mark_of(of).encode() + b"\n"


@pytest.mark.parametrize("version", LINES)
def test_each_version_is_read(version):
    (found,) = primitives_of(marked(*OTHERS, LINES[version], *OTHERS, of=call()), [call()])
    assert (found.kind, found.path, found.shape) == ("reorder", "nchw -> nChw16c", (2, 32, 14, 14))
    assert found.seconds == pytest.approx(0.25e-3)
    assert (found.call, found.operator, found.site.module) == (7, "conv2d", "stem.conv")


def test_what_is_copied_is_told_by_size_and_where_sizes_are_equal_by_layout():
    lines = (
        reorder("abcd", "aBcd16b", "2x32x14x14"),
        reorder("abcd", "ABcd16b16a", "32x32x3x3"),
        CONV,
        reorder("aBcd16b", "abcd", "2x32x14x14"),
    )
    found = primitives_of(marked(*lines, of=call()), [call()])
    assert [p.role for p in found] == ["input", "weight", "", "output"]
    assert found[1].path == "oihw -> OIhw16i16o"
    square = call((32, 32, 3, 3))
    lines = tuple(line.replace(b"2x32x14x14", b"32x32x3x3") for line in lines)
    found = primitives_of(marked(*lines, of=square), [square])
    assert [p.role for p in found] == ["input", "weight", "", "output"]


def test_every_line_goes_to_the_call_that_ended_after_it():
    one, two = call(index=1), call(index=2)
    text = marked(CONV, of=one) + marked(of=call(index=3)) + marked(CONV, CONV, of=two) + CONV
    assert [p.call for p in primitives_of(text, [one, two])] == [1, 2, 2, None]


def test_what_others_print_stays_theirs():
    text = b"epoch 1, " + CONV + marked(b"done\n", of=call()) + b"rest"
    assert of_others(text, ours=True) == b"epoch 1, done\nrest"
    assert of_others(text, ours=False) == b"epoch 1, " + CONV + b"done\nrest"
    assert is_told(text)
    assert not is_told(b"epoch 1\n")
