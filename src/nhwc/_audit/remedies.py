"""Say what to change in the user's code where an operator drops or converts the format."""

from __future__ import annotations

import math

from ..formats import Format
from ..operators.kinds import arithmetic_of, is_pointwise
from ..watch.calls import Call, TensorSpec
from ..watch.effects import Effect, short_name

_OF_VOLUMES = {
    "torch.channels_last": "torch.channels_last_3d",
    "Format.CHANNELS_LAST": "Format.CHANNELS_LAST_3D",
    "permute(0, 2, 3, 1)": "permute(0, 2, 3, 4, 1)",
    "permute(0, 3, 1, 2)": "permute(0, 4, 1, 2, 3)",
    "contiguous image": "contiguous volume",
    ".view(-1, 1, 1)": ".view(-1, 1, 1, 1)",
    "one image": "one volume",
    "nn.Conv2d": "nn.Conv3d",
}
"""What torch calls a thing of images, and the same of volumes."""


def remedy(call: Call, effect: Effect) -> str:
    """Say why this call had that effect and what to write instead, in one or two sentences."""
    said = _remedy(call, effect)
    ranks = {len(tensor.shape) for tensor in (*call.inputs, *call.outputs)}
    # What makes five dimensions of an image, or an image of five, is about images.
    if 5 in ranks and 4 not in ranks:
        for of_images, of_volumes in _OF_VOLUMES.items():
            said = said.replace(of_images, of_volumes)
    return said


def _remedy(call: Call, effect: Effect) -> str:
    name = short_name(call.operator)
    slow = _conv3d(call) if name == "conv3d" else ""
    if effect is Effect.MISREADS:
        return slow or _misread(call, name)
    if effect is Effect.CONVERTS and call.backward:
        return f"If this line is in a backward of your own, drop its copy. Else: {_backward(name)}"
    if effect is Effect.CONVERTS:
        return _converted(call, name)
    if effect is Effect.RESTORES:
        return (
            f"`{name}` has channels-last weights and copies its input to match them on every call. "
            "Convert the input once: x = x.to(memory_format=torch.channels_last)."
        )
    if name == "contiguous" and effect is Effect.NEUTRAL and _orders_tokens(call):
        return (
            "This `contiguous` lays out pixels that were a sequence, channels densest, which is an "
            "image in channels last already. Drop it, and write .reshape for a .view behind it."
        )
    if effect in (Effect.NEUTRAL, Effect.PLAIN):
        made = ", or make it so: torch.empty(..., memory_format=torch.channels_last)"
        filled = not call.inputs or name.startswith("new_")
        return (
            f"`{name}` makes a contiguous image here, which is copied later on every call, because "
            f"weights behind it are channels last. Convert its result{made if filled else ''}."
        )
    if effect is Effect.KEEPS and _only_weights(call):
        return (
            f"`{name}` copies its weight to channels last on every call, because the weight is "
            "computed anew each time (a parametrization or a standardized convolution). For "
            "inference compute it once (torch.nn.utils.parametrize.remove_parametrizations, or "
            "torch.nn.utils.remove_weight_norm for the older weight_norm), then call nhwc.convert_."
        )
    if effect is Effect.KEEPS:
        return slow or (
            f"`{name}` returns channels last but its kernel has no path for it here: it copies in "
            "and out on every call. Use another operator, or keep this stretch contiguous."
        )
    if call.backward:
        return _backward(name)
    if name in _CONCATENATING:
        return _cat(call)
    if name == "instance_norm":
        return _instance_norm(call)
    return slow or _SPECIAL.get(name) or _general(call, name)


def _orders_tokens(call: Call) -> bool:
    """Whether it reads a sequence of pixels as N, C, pixels, channels densest."""
    first = call.inputs[0] if call.inputs else None
    return first is not None and len(first.shape) == 3 and first.densest == 1


def _only_weights(call: Call) -> bool:
    weight = call.inputs[1].shape if len(call.inputs) > 1 else None
    return "conv" in call.operator and all(copy.shape == weight for copy in call.copies)


def _first_image(call: Call) -> TensorSpec | None:
    return next((i for i in call.inputs if len(i.shape) >= 4), None)


_CONCATENATING = ("cat", "concat", "stack")


def _cat(call: Call) -> str:
    images = [i for i in call.inputs if len(i.shape) >= 4 or 0 in i.shape]
    number, culprit = next(
        ((n, i) for n, i in enumerate(images, 1) if 0 in i.shape or not (i.strides and i.marked)),
        (1, images[0]),
    )
    if 0 in culprit.shape:
        what = "is empty, and no strides of it say channels last"
        do = "Leave it out of the list"
    elif culprit.format is Format.AMBIGUOUS:
        what = "is ambiguous (its strides are true of both formats) and was read as contiguous"
        do = "Mark it with nhwc.to_format(x, Format.CHANNELS_LAST)"
    elif culprit.spread:
        what = "is expanded: its strides say no format"
        do = _FRAMES if len(culprit.shape) == 5 else _ALONE
    elif culprit.format is Format.CONTIGUOUS:
        what, do = "is contiguous", "Convert it where it is made"
    else:
        what = "is a slice (chunk, split or x[:, a:b]) of a tensor that is contiguous"
        do = "Keep that tensor in channels last where it is made; nhwc.optimize does it"
    return (
        f"`torch.{short_name(call.operator)}` keeps channels last only if every input has it; "
        f"input {number} of {len(images)} {what}. {do} (pytorch#118082)."
    )


def _conv3d(call: Call) -> str:
    """Why torch takes its own kernel on a processor, by its own rule; "" where that is not why."""
    if len(call.inputs) < 2 or call.inputs[0].dtype != "float32":
        return ""
    clip, weight = (one.shape for one in call.inputs[:2])
    if clip[0] == 1 and math.prod(clip[:-1]) <= 20480:
        return (
            "`conv3d` has no channels-last path for a single clip this small (N*C*D*H up to 20480);"
            " audit at the real size. A plan of nhwc.optimize takes a kernel that has one; the "
            "graph below it, and calls without a plan, take torch's (pytorch#59168)."
        )
    if weight[-2:] == (1, 1) and clip[0] < 16:
        return (
            "`conv3d` by a kernel of one pixel (1x1x1, 3x1x1) has no channels-last path on a "
            "single thread for fewer than 16 clips. With torch.set_num_threads(2) or more torch "
            "takes oneDNN's kernel, which has one, as kernels of nhwc.optimize have on any number."
        )
    return ""


def _pointwise(decided: TensorSpec, name: str) -> str:
    state = "contiguous" if decided.format is Format.CONTIGUOUS else "a slice"
    plain = name.strip("_")
    place = "second" if plain in _SWAPPING else "first"
    commutes = plain in _COMMUTING or arithmetic_of(plain.removeprefix("r")) in _COMMUTING
    do = "Swap them, or convert the first" if commutes else "Convert that one"
    return (
        f"The operands of `{name}` have different formats, and the {place}, which is {state}, "
        f"decided. {do} to channels last where it is made."
    )


_SWAPPING = ("rsub",)
"""What torch computes as another operator with its operands swapped."""

_COMMUTING = ("add", "mul", "maximum", "minimum")


def _general(call: Call, name: str) -> str:
    images = [i for i in call.inputs if len(i.shape) >= 4]
    decides = images[-1 if name.strip("_") in _SWAPPING else 0] if len(images) > 1 else None
    if decides is not None and not decides.format.is_last and is_pointwise(name):
        return _pointwise(decides, name)
    return (
        f"`{name}` has no channels-last path in this torch: it returns a contiguous tensor. "
        "Replace it, or call .contiguous(memory_format=torch.channels_last) on its result so that "
        "one copy is paid here and none later."
    )


_ALONE = "Call .contiguous(memory_format=torch.channels_last) on it, which copies nothing else"

_FRAMES = (
    "To put the first frame in front n times, write "
    'F.pad(x, (0, 0, 0, 0, n, 0), mode="replicate"), which keeps the format'
)

_NORM = (
    "`instance_norm` copies to contiguous, normalises as a batch norm and returns contiguous "
    "(pytorch#194616). `nhwc.optimize` mends it; `GroupNorm(C, C)` keeps the format on CPU, but "
    "there torch loses digits where the mean is large beside the deviation."
)

_ADAPTIVE = (
    "`instance_norm` copies to contiguous and returns contiguous (pytorch#194616). Its weights are "
    "computed, so nhwc.optimize leaves it. Behind it they are the same, "
    "F.instance_norm(x) * weight.view(-1, 1, 1) + bias.view(-1, 1, 1), and that is mended."
)


def _instance_norm(call: Call) -> str:
    computed = any(len(i.shape) == 1 and i.source is not None for i in call.inputs)
    return _ADAPTIVE if computed else _NORM


def _softmax(name: str) -> str:
    return (
        f"`{name}` returns a contiguous tensor. Over the channels (1), x.permute(0, 2, 3, 1)"
        f".{name}(-1).permute(0, 3, 1, 2) computes the same, moves nothing and keeps the format. "
        "Over another dimension, as of attention scores, keep x contiguous from where it is made."
    )


def _gathered(words: str) -> str:
    return (
        f"{words} returns a contiguous tensor. Taken in the order in which the pixels lie it keeps "
        "the format: x.permute(0, 2, 3, 1)[..., index].permute(0, 3, 1, 2) is x[:, index]; a run "
        "of channels is a slice, x[:, a:b], which moves nothing."
    )


_SPECIAL = {
    "__getitem__": _gathered("Indexing with a tensor, a list or a mask"),
    "index_select": _gathered("`index_select`"),
    "pad": (
        "`pad` builds its result contiguous in circular mode, and so does "
        'nn.Conv2d(padding_mode="circular"), which calls it. nhwc.optimize pads in NHWC. Elsewhere '
        "convert the result once with .contiguous(memory_format=torch.channels_last). The modes "
        "constant, reflect and replicate keep the format."
    ),
    "repeat": (
        "`repeat` always returns a contiguous tensor, and a `cat` or a convolution behind it then "
        f"loses or restores the format (sglang#27431). {_FRAMES}; elsewhere convert its result "
        "once. nhwc.optimize mends it."
    ),
    "grid_sample": (
        "`grid_sample` reads channels last but always writes contiguous. Convert its result once "
        "with .contiguous(memory_format=torch.channels_last) if convolutions follow."
    ),
    "grid_sampler_2d": "`grid_sample` always writes contiguous; convert its result once.",
    "masked_fill": (
        "`masked_fill` always returns a contiguous tensor. x.clone().masked_fill_(mask, value) "
        "computes the same and keeps the format."
    ),
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
}


def _stacks_frames(call: Call) -> bool:
    """Whether it reads a volume with its frames before its channels, and these are densest."""
    first = _first_image(call)
    if first is None or len(first.strides) != 5:
        return False
    # Channels that are split into groups are denser than a row.
    return first.densest == 2 and first.strides[1] > first.strides[3]


def _splits_channels(call: Call) -> bool:
    """Whether it reads an image whose channels were split in two, and swapped."""
    first = _first_image(call)
    if first is None or len(first.strides) != 5:
        return False
    _, one, other, row, _ = first.strides
    return 0 < one < other < row


def _misread(call: Call, name: str) -> str:
    image = next((i for i in call.inputs if i.format.is_last and not i.marked), None)
    if image is not None:
        return (
            f"The input of `{name}` is one image with a batch stride of {image.strides[0]} (a "
            "view of tokens, say), by which torch took it for contiguous. Mark it: "
            "nhwc.to_format(x, Format.CHANNELS_LAST), which copies nothing."
        )
    return (
        f"The input of `{name}` has one channel or one pixel, so its strides are true of both "
        "formats, and it was read as contiguous. Mark it: nhwc.to_format(x, Format.CHANNELS_LAST) "
        "(pytorch#68430, pytorch#24090)."
    )


def _converted(call: Call, name: str) -> str:
    if not call.moves_data:
        return (
            f"This `{name}` writes channels last into a contiguous tensor. Make that one in "
            "channels last: torch.empty(..., memory_format=torch.channels_last), and .zero_() it "
            "where it begins with zeros."
        )
    if name in ("contiguous", "reshape") and _stacks_frames(call):
        return (
            f"This `{name}` copies a volume whose channels and frames were swapped. As a batch of "
            "images it is the same memory: x.transpose(1, 2).flatten(0, 1) of a volume in channels "
            "last, without .contiguous(), is a view in channels last."
        )
    if call.asked is not None and name not in ("contiguous", "clone"):
        return (
            f"This `{name}` is asked for memory_format=torch.contiguous_format. Leave that out: "
            "it keeps the format of its input then."
        )
    if _splits_channels(call):
        return (
            f"This `{name}` lays out channels that were split into groups and swapped. A channel "
            "shuffle can be nn.ChannelShuffle, which keeps the format in eager mode "
            "(pytorch#197109)."
        )
    if name in ("reshape", "flatten", "unflatten", "view_as", "reshape_as"):
        return (
            f"This `{name}` cannot be a view of channels-last memory, so it copies to contiguous. "
            "Split the channel with .view or .unflatten on the channel dimension only, or work on "
            "x.permute(0, 2, 3, 1), where the channel comes last."
        )
    return f"Drop the `{name}`, or give it memory_format=torch.channels_last."


def _backward(name: str) -> str:
    return (
        f"The backward pass `{name}` returns a contiguous gradient though channels last went in "
        "(pytorch#34812 is one such report). Replace the forward operator, or convert its input's "
        "gradient with a hook: x.register_hook(lambda g: g.contiguous("
        "memory_format=torch.channels_last))."
    )
