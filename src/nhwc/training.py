"""What `nhwc.train` takes and returns: settings, images and the record of a run.

>>> import nhwc
>>> from nhwc.training import Recipe, synthetic
>>> from torch import nn
>>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
>>> data = synthetic(batch_size=4, shape=(16, 16, 3), classes=8, batches=2)
>>> run = nhwc.train(net, data, Recipe(channels_last=True))
>>> len(run.of("train"))
1

`image_folders` finds train/ and val/ in a folder. Images of another kind are a `Source`, which
`Loader` makes batches of.
"""

from ._train.data import Data as Data
from ._train.data import image_folders as image_folders
from ._train.data import synthetic as synthetic
from ._train.images import ImageFolder as ImageFolder
from ._train.images import Source as Source
from ._train.images import Synthetic as Synthetic
from ._train.loader import Loader as Loader
from ._train.progress import Point as Point
from ._train.progress import Training as Training
from ._train.recipe import Recipe as Recipe

__all__ = [
    "Data",
    "ImageFolder",
    "Loader",
    "Point",
    "Recipe",
    "Source",
    "Synthetic",
    "Training",
    "image_folders",
    "synthetic",
]
