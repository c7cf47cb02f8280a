"""Training in mixed precision and channels last, in pieces: take `train`, or the ones you need."""

from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .data import Data as Data
from .data import image_folders as image_folders
from .data import synthetic as synthetic
from .distributed import process_group as process_group
from .distributed import shard_ as shard_
from .evaluation import evaluate as evaluate
from .images import ImageFolder as ImageFolder
from .images import Source as Source
from .images import Synthetic as Synthetic
from .loader import Batch as Batch
from .loader import Loader as Loader
from .loop import train as train
from .metrics import MetricsLog as MetricsLog
from .precision import remarks as remarks
from .progress import Point as Point
from .progress import Training as Training
from .recipe import Recipe as Recipe
from .step import Normalize as Normalize
from .step import TrainingStep as TrainingStep
from .trainer import Trainer as Trainer

__all__ = [
    "Batch",
    "Data",
    "ImageFolder",
    "Loader",
    "MetricsLog",
    "Normalize",
    "Point",
    "Recipe",
    "Source",
    "Synthetic",
    "Trainer",
    "Training",
    "TrainingStep",
    "evaluate",
    "image_folders",
    "load_checkpoint",
    "process_group",
    "remarks",
    "save_checkpoint",
    "shard_",
    "synthetic",
    "train",
]
